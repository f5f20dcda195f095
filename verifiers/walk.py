"""From which tests passed to the node where a row stops.

`passed` is [M] bool over packed nodes: the node's uniform lay below its threshold.
"""

from __future__ import annotations

import numpy as np

from stand.trees import NO_PARENT

NONE = -1


def first_in_post_order(passed: np.ndarray, *, parents: np.ndarray, roots: np.ndarray) -> np.ndarray:
    """[B] packed: per row the first passing node in post-order (children in rank order, then their parent).

    Roots always pass. Children stand after their parents and in rank order, so one backward sweep that lets
    each node overwrite its parent's answer leaves the answer of the first child.
    """
    first = np.where(passed, np.arange(len(passed)), NONE).tolist()
    parent_of = parents.tolist()
    for root in roots.tolist():
        first[root] = root
    for node in range(len(first) - 1, -1, -1):
        if first[node] != NONE and parent_of[node] != NO_PARENT:
            first[parent_of[node]] = first[node]
    return np.array([first[root] for root in roots.tolist()], dtype=np.int64)


def last_from_top(passed: np.ndarray, *, parents: np.ndarray, roots: np.ndarray) -> np.ndarray:
    """[B] packed: from the root on, step to the first child that passes; the node where none does."""
    nodes = np.flatnonzero(passed & (parents != NO_PARENT))[::-1]
    chosen = np.full(len(passed), NONE, dtype=np.int64)
    chosen[parents[nodes]] = nodes  # of repeated indices the last assignment stays: the lowest rank
    stops = []
    for node in roots.tolist():
        while chosen[node] != NONE:
            node = int(chosen[node])
        stops.append(node)
    return np.array(stops, dtype=np.int64)


def path_to(node: int, parents: np.ndarray) -> list[int]:
    """Packed nodes from below the root to `node`, both ends as said; empty at a root."""
    path = []
    while parents[node] != NO_PARENT:
        path.append(node)
        node = int(parents[node])
    return path[::-1]
