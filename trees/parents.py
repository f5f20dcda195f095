"""Trees as lists of parents: their rule, and what follows from them."""

from __future__ import annotations

import numpy as np

ROOT = 0
NO_PARENT = -1


def check_parents(parents: np.ndarray) -> None:
    """Raise ValueError unless parents [N] begin with NO_PARENT and every other parent comes before its child."""
    if parents.ndim != 1 or len(parents) == 0 or parents[ROOT] != NO_PARENT:
        raise ValueError(
            f"parents must be a list that starts with {NO_PARENT}, got {parents.tolist()}; put the root first"
        )
    wrong = (parents[1:] < 0) | (parents[1:] >= np.arange(1, len(parents)))
    if wrong.any():
        i = int(wrong.argmax()) + 1
        raise ValueError(
            f"parents[i] must be in [0, i) for i > 0, got parents[{i}] = {parents[i]}; put parents first, and count "
            "from the draft's own root"
        )


def depths_and_ranks(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Depths (0 at the root), ranks (positions among the siblings) and numbers of children, int32 [N] each.

    parents: int [N], as `check_parents` wants them.
    """
    depths, ranks, num_children = np.zeros((3, len(parents)), dtype=np.int32)
    for node in range(1, len(parents)):
        parent = parents[node]
        depths[node] = depths[parent] + 1
        ranks[node] = num_children[parent]
        num_children[parent] += 1
    return depths, ranks, num_children
