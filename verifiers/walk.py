"""From which tests passed to the node where a row stops.

`passed` is [M] bool over packed nodes: the node's uniform lay below its threshold. `order` is [M] packed nodes with
parents before children and siblings in the order in which they are tested.
"""

from __future__ import annotations

import numpy as np

from stand.trees import NO_PARENT

NONE = -1


def first_in_post_order(passed: np.ndarray, *, parents: np.ndarray, roots: np.ndarray, order: np.ndarray) -> np.ndarray:
    """[B] packed: per row the first passing node in post-order (children in test order, then their parent).

    Roots always pass. One backward sweep in which each node overwrites its parent's answer leaves there the answer of
    the first child that has one.
    """
    first = np.where(passed, np.arange(len(passed)), NONE).tolist()
    parent_of = parents.tolist()
    for root in roots.tolist():
        first[root] = root
    for node in order[::-1].tolist():
        if first[node] != NONE and parent_of[node] != NO_PARENT:
            first[parent_of[node]] = first[node]
    return np.array([first[root] for root in roots.tolist()], dtype=np.int64)


def last_from_top(passed: np.ndarray, *, parents: np.ndarray, roots: np.ndarray, order: np.ndarray) -> np.ndarray:
    """[B] packed: from the root on, step to the first child that passes; the node where none does."""
    nodes = order[passed[order] & (parents[order] != NO_PARENT)][::-1]
    chosen = np.full(len(passed), NONE, dtype=np.int64)
    chosen[parents[nodes]] = nodes  # of repeated indices the last assignment stays: the first in test order
    stops = []
    for node in roots.tolist():
        while chosen[node] != NONE:
            node = int(chosen[node])
        stops.append(node)
    return np.array(stops, dtype=np.int64)


def deepest_passing(passed: np.ndarray, *, parents: np.ndarray, roots: np.ndarray, order: np.ndarray) -> np.ndarray:
    """[B] packed: the end of the longest path from the root whose nodes all pass; of equal ones the first in order."""
    best = list(range(len(passed)))  # where the longest passing path below each node ends
    length = [0] * len(passed)
    for node in order[::-1].tolist():
        parent = int(parents[node])
        if parent != NO_PARENT and passed[node] and length[node] + 1 >= length[parent]:
            best[parent], length[parent] = best[node], length[node] + 1
    return np.array([best[root] for root in roots.tolist()], dtype=np.int64)


def path_to(node: int, parents: np.ndarray) -> list[int]:
    """Packed nodes from below the root to `node`, both ends as said; empty at a root."""
    path = []
    while parents[node] != NO_PARENT:
        path.append(node)
        node = int(parents[node])
    return path[::-1]
