from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from stand.trees.draft import DraftBatch

LARGEST_PROBABILITY: float

def tokens_of(values: Any, name: str) -> np.ndarray: ...
def checked_laws(top_ids: Any, top_probs: Any, num_laws: int) -> tuple[np.ndarray, np.ndarray]: ...
def check_batch(batch: DraftBatch) -> None: ...
def checked_estimates(batch: DraftBatch) -> np.ndarray: ...
def chains(batch: DraftBatch, num_tokens: int) -> list[list[int]]: ...
def ancestor_masks(
    batch: DraftBatch, num_nodes: int, pad_id: int, out: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]: ...
def left_aligned(texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]: ...

class KnownTexts:
    most_parked: int
    def __init__(self, num_rows: int, *, num_notes: int, most_parked: int = 4096) -> None: ...
    def find(self, tokens: np.ndarray, rows: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...
    def keep(self, tokens: np.ndarray, rows: np.ndarray, lengths: np.ndarray, notes: np.ndarray) -> None: ...

class NamedTexts:
    def __contains__(self, name: str) -> bool: ...
    def find(self, names: Sequence[str], lengths: Sequence[int]) -> tuple[np.ndarray, list[int]]: ...
    def keep(self, names: Sequence[str], lengths: Sequence[int], scopes: Sequence[int]) -> None: ...
    def forget(self, names: Iterable[str]) -> None: ...

DRAFT: int
ACCEPT: int
RESAMPLE: int
TARGET: int
GOLDEN_GAMMA: int
FIRST_FACTOR: int
SECOND_FACTOR: int

Numbers = int | Sequence[int] | np.ndarray

def uniforms(seed: int, stream: int, rows: Numbers, steps: Numbers, nodes: Numbers, *, slot: int = 0) -> np.ndarray: ...
def node_uniforms(
    seed: int,
    stream: int,
    row_numbers: np.ndarray,
    step_numbers: np.ndarray,
    row_offsets: np.ndarray,
    node_depths: np.ndarray | None = None,
    *,
    out: np.ndarray | None = None,
) -> np.ndarray: ...
def fill_tests(
    seed: int,
    row_numbers: np.ndarray,
    step_numbers: np.ndarray,
    row_offsets: np.ndarray,
    accept: np.ndarray,
    resample: np.ndarray,
) -> None: ...
def step_keys(seed: int, stream: int, rows: Numbers, steps: Numbers) -> np.ndarray: ...
