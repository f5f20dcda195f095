"""What the compiled code of the lookup tree asks of Python: arguments that it checks once a draft, arrays to fill."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stand.trees.arguments import whole
from stand.trees.draft import NO_TOKEN, DraftBatch
from stand.trees.kinds import SHAPED_KINDS
from stand.trees.longest_match.file import Table

MAX_ORDER = 16


def checked_orders(orders: Sequence[int]) -> tuple[int, ...]:
    """Raises ValueError for others than ascending ones within 1..MAX_ORDER."""
    numbers = tuple(whole(order, "orders") for order in orders)
    if not numbers or list(numbers) != sorted(set(numbers)) or numbers[0] < 1 or numbers[-1] > MAX_ORDER:
        raise ValueError(f"orders must be ascending and within 1..{MAX_ORDER}, got {numbers}; (1, 2, 3, 4) is usual")
    return numbers


def empty_table(order: int, num_candidates: int) -> Table:
    rows = np.empty((0, num_candidates), np.int32), np.empty((0, num_candidates), np.float32)
    return np.empty((0, order), np.int32), np.empty(0, np.uint32), *rows


def shapes_per_row(shape: object, num_rows: int, kind: str) -> list[object]:
    """Raises ValueError for a kind of draft that follows no shape, and for other than one shape or one per row."""
    if kind not in SHAPED_KINDS:
        raise ValueError(f"kind must be one of {SHAPED_KINDS}, got {kind!r}; sampled is usual")
    shapes = [shape] * num_rows if hasattr(shape, "parents") else list(shape)
    if num_rows == 0 or len(shapes) != num_rows:
        raise ValueError(
            f"draft needs one history and one shape per row, got {num_rows} and {len(shapes)}; one TreeShape serves "
            "all rows"
        )
    return shapes


def empty_arrays(room: int, num_candidates: int) -> dict[str, np.ndarray]:
    """Those of a `DraftBatch` with as many nodes as there is room for, its offsets left out."""
    per_node = ("token_ids", "parents", "depths", "ranks", "slots")
    return {name: np.empty(room, dtype=np.int32) for name in per_node} | {
        "support_ids": np.full((room, num_candidates), NO_TOKEN, dtype=np.int32),
        "law": np.zeros((room, num_candidates), dtype=np.float32),
    }


def batch_of(arrays: dict[str, np.ndarray], num_nodes: int, num_rows: int, *, adapted: bool) -> DraftBatch:
    """The first `num_nodes` of what was filled."""
    filled = {name: array[:num_nodes] for name, array in arrays.items()}
    roots = np.flatnonzero(filled["parents"] < 0)
    offsets = np.append(roots, num_nodes).astype(np.int32)
    if len(offsets) != num_rows + 1:
        raise AssertionError("a draft must have one root per row")
    return DraftBatch(offsets=offsets, adapted=adapted, **filled)
