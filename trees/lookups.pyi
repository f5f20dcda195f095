import os
from collections.abc import Sequence
from typing import Literal

import numpy as np

from stand.trees.draft import DraftBatch
from stand.trees.shape import TreeShape

MAX_DEPTH: int
HAS_WIDE_VECTORS: bool
MAX_SCOPE: int
DEFAULT_MAX_BYTES: int
MOST_ENTRIES: tuple[int, ...]
NUM_ODDS: int

DraftKind = Literal["sampled", "mixed", "deterministic"]
ShapedKind = Literal["sampled", "mixed", "deterministic", "coupled", "independent"]

class OutsideLaws:
    ANY_TOKEN: int
    source: int
    def __init__(
        self,
        offsets: np.ndarray,
        parents: np.ndarray,
        token_ids: np.ndarray,
        top_ids: np.ndarray,
        top_probs: np.ndarray,
        *,
        source: int = 0,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @classmethod
    def of_heads(cls, top_ids: np.ndarray, top_probs: np.ndarray, *, source: int = 0) -> OutsideLaws: ...

class TokenMasks:
    def __init__(self, plan: DraftBatch, words: np.ndarray, *, allows_beyond: bool = False) -> None: ...
    def __len__(self) -> int: ...

class BlendedLookup:
    depth: int
    max_bytes: int
    fade: float
    rate: float
    num_candidates: int
    fingerprint: bytes
    digest: int
    def __init__(
        self,
        *,
        depth: int = 12,
        max_bytes: int = ...,
        fade: float = 0.95,
        rate: float = 0.05,
        num_candidates: int = 10,
        fingerprint: bytes = b"",
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def num_evicted(self) -> int: ...
    def name_vocabulary(self, fingerprint: bytes) -> None: ...
    def clear(self) -> None: ...
    def start_call(self, *, learns: bool) -> int: ...
    def learn(
        self,
        context: Sequence[int] | np.ndarray,
        token_ids: Sequence[int] | np.ndarray,
        *,
        top_ids: np.ndarray | None = None,
        top_probs: np.ndarray | None = None,
        scope: int = 0,
    ) -> None: ...
    def learn_rows(
        self,
        tokens: np.ndarray,
        lengths: Sequence[int] | np.ndarray,
        num_new: Sequence[int] | np.ndarray,
        *,
        rows: Sequence[int] | np.ndarray | None = None,
        scopes: Sequence[int] | np.ndarray | None = None,
    ) -> None: ...
    def learn_batch(
        self,
        batch: DraftBatch,
        histories: Sequence[np.ndarray],
        top_ids: np.ndarray,
        top_probs: np.ndarray,
        nodes: np.ndarray | None = None,
        *,
        scopes: Sequence[int] | np.ndarray | None = None,
    ) -> None: ...
    def predict(
        self, context: Sequence[int] | np.ndarray, *, limit: int = 10, scope: int = 0
    ) -> tuple[np.ndarray, np.ndarray]: ...
    def draft(
        self,
        histories: Sequence[np.ndarray],
        budget: int,
        *,
        seed: int,
        rows: np.ndarray | Sequence[int],
        steps: np.ndarray | Sequence[int],
        kind: DraftKind = "deterministic",
        floor: float = 0.0,
        rises: np.ndarray | None = None,
        max_depths: np.ndarray | Sequence[int] | None = None,
        max_nodes: np.ndarray | Sequence[int] | int | None = None,
        width: int | None = None,
        scopes: Sequence[int] | np.ndarray | None = None,
        outside: OutsideLaws | None = None,
        masks: TokenMasks | None = None,
    ) -> DraftBatch: ...
    def record_outcome(
        self,
        batch: DraftBatch,
        accepted: Sequence[np.ndarray],
        next_tokens: np.ndarray | Sequence[int],
        *,
        kind: DraftKind,
    ) -> None: ...
    def check(self) -> None: ...
    def save(self, path: str | os.PathLike) -> None: ...
    @classmethod
    def load(
        cls, path: str | os.PathLike, *, fingerprint: bytes | None = None, max_bytes: int | None = None
    ) -> BlendedLookup: ...

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
        kind: ShapedKind = "sampled",
        floor_order: int = 1,
    ) -> DraftBatch: ...
    def save(self, path: str | os.PathLike) -> None: ...
    @classmethod
    def load(cls, path: str | os.PathLike, *, fingerprint: bytes | None = None) -> LookupTree: ...
