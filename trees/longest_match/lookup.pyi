import os
from collections.abc import Sequence
from typing import Literal

import numpy as np

from stand.trees.draft import DraftBatch
from stand.trees.shape import TreeShape

MAX_ORDER: int
MAX_CANDIDATES: int
KINDS: tuple[str, ...]
SHAPED_KINDS: tuple[str, ...]

DraftKind = Literal["sampled", "mixed", "deterministic", "coupled", "independent"]

class LookupTree:
    orders: tuple[int, ...]
    num_candidates: int
    min_rate: float
    fingerprint: bytes
    digest: int
    def __init__(
        self,
        *,
        orders: Sequence[int] = (1, 2, 3, 4),
        num_candidates: int = 10,
        min_rate: float = 0.1,
        fingerprint: bytes = b"",
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def name_vocabulary(self, fingerprint: bytes) -> None: ...
    def clear(self) -> None: ...
    def start_call(self, *, learns: bool) -> int: ...
    def copy(self) -> LookupTree: ...
    def learn(
        self,
        context: Sequence[int] | np.ndarray,
        token_ids: Sequence[int] | np.ndarray,
        *,
        top_ids: np.ndarray | None = None,
        top_probs: np.ndarray | None = None,
    ) -> None: ...
    def learn_batch(
        self,
        batch: DraftBatch,
        histories: Sequence[np.ndarray],
        top_ids: np.ndarray,
        top_probs: np.ndarray,
        nodes: np.ndarray | None = None,
    ) -> None: ...
    def lookup(
        self, context: Sequence[int] | np.ndarray, *, floor_order: int = 1
    ) -> tuple[int, np.ndarray, np.ndarray, int] | None: ...
    def draft(
        self,
        histories: Sequence[np.ndarray],
        shape: TreeShape | Sequence[TreeShape],
        *,
        seed: int,
        rows: np.ndarray | Sequence[int],
        steps: np.ndarray | Sequence[int],
        positions: np.ndarray | Sequence[int] | None = None,
        kind: DraftKind = "sampled",
        floor_order: int = 1,
    ) -> DraftBatch: ...
    def save(self, path: str | os.PathLike) -> None: ...
    @classmethod
    def load(cls, path: str | os.PathLike, *, fingerprint: bytes | None = None) -> LookupTree: ...
