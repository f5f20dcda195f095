from collections.abc import Sequence

import numpy as np

from stand.trees.draft import DraftBatch

def chains(batch: DraftBatch, num_tokens: int) -> list[list[int]]: ...
def ancestor_masks(
    batch: DraftBatch, num_nodes: int, pad_id: int, out: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]: ...
def left_aligned(texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]: ...
