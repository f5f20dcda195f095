"""The law of the set of tokens that successive draws without replacement give.

A set over S columns is a number below 2^S, bit x for column x; tables have one column per set.
"""

from __future__ import annotations

from functools import cache

import numpy as np

MAX_SUPPORT = 14  # tables have 2^S columns


@cache
def set_sizes(num_columns: int) -> np.ndarray:
    """[2^S] int64: how many columns each set holds."""
    if num_columns > MAX_SUPPORT:
        raise ValueError(
            f"rules over sets of siblings must get at most {MAX_SUPPORT} candidates per context, got {num_columns}; "
            "use verifier 'traversal'"
        )
    return (np.arange(2**num_columns)[:, None] >> np.arange(num_columns) & 1).sum(axis=1)


@cache
def _sets_of_size(num_columns: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(sets [n], their columns [n, size])."""
    sets = np.flatnonzero(set_sizes(num_columns) == size)
    bits = sets[:, None] >> np.arange(num_columns) & 1
    return sets, np.nonzero(bits)[1].reshape(len(sets), size)


def set_law(law: np.ndarray, max_size: int) -> np.ndarray:
    """[n, 2^S] float64: the probability that the first |A| draws from law [n, S] are the set A, for |A| <= max_size.

    F(A) = sum over x in A of F(A - x) q(x) / q(outside A - x): which token came last.
    """
    num_columns = law.shape[1]
    sizes = set_sizes(num_columns)
    members = (np.arange(2**num_columns)[:, None] >> np.arange(num_columns) & 1).astype(np.float64)
    outside = law @ (1.0 - members).T
    table = np.zeros((len(law), len(sizes)))
    table[:, 0] = 1.0
    for size in range(1, max_size + 1):
        sets, columns = _sets_of_size(num_columns, size)
        before = sets[:, None] ^ (1 << columns)
        left = outside[:, before]
        step = np.where(left > 0, law[:, columns] / np.where(left > 0, left, 1.0), 0.0)
        table[:, sets] = (table[:, before] * step).sum(axis=2)
    return table
