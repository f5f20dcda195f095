"""Two rows whose joint drafts are enumerated: histories for `taught_lookups`, and the targets' worlds."""

from functools import cache

import numpy as np
from draft_worlds import dense_world
from exact import World

HISTORIES = [np.array([0, 1, 0], np.int32), np.array([2, 0, 0], np.int32)]
SAME = [HISTORIES[0], HISTORIES[0]]


@cache
def worlds(size: int) -> list[World]:
    """One of each row, with so many tokens."""
    return [dense_world(seed, size, 2).as_float() for seed in (5, 6)]
