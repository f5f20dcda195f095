"""The most that sets of siblings can carry to the target: a maximum flow from sets to tokens."""

from __future__ import annotations

import numpy as np

ROUNDING = 1e-15


def largest_transport(supply: np.ndarray, members: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """[n, S] float64: how much of each set's probability goes to each of its tokens, as much as possible in all.

    supply: [n] the sets' probabilities; members: [n, S] bool; capacity: [S] what each token may take. Rows of the
    answer sum to at most `supply`, columns to at most `capacity`. Shortest augmenting paths, on tokens: a path enters
    at a token of a set with probability left, moves mass from a token to another token of the same sets, and ends at a
    token with capacity left. Ties: lowest column. Any plan kept half-way would be feasible too.
    """
    flow = np.zeros(members.shape)
    while True:
        slack = np.maximum(supply - flow.sum(axis=1), 0.0)
        spare = np.maximum(capacity - flow.sum(axis=0), 0.0)
        entry = slack @ members
        movable = flow.T @ members  # [from, to]
        path = _shortest_path(entry, movable, spare)
        if not path:
            return flow
        edges = list(zip(path[:-1], path[1:], strict=True))
        amount = min(entry[path[0]], spare[path[-1]], *(movable[edge] for edge in edges))
        change = np.zeros_like(flow)
        change[:, path[0]] += slack * members[:, path[0]] * (amount / entry[path[0]])
        for source, destination in edges:
            moved = flow[:, source] * members[:, destination] * (amount / movable[source, destination])
            change[:, source] -= moved
            change[:, destination] += moved
        flow = np.maximum(flow + change, 0.0)


def _shortest_path(entry: np.ndarray, movable: np.ndarray, spare: np.ndarray) -> list[int]:
    """Columns of a shortest path from a token that mass can enter at to one with capacity left; [] if there is none."""
    previous = {int(column): -1 for column in np.flatnonzero(entry > ROUNDING)}
    queue = list(previous)
    for column in queue:
        if spare[column] > ROUNDING:
            path = [column]
            while previous[path[-1]] >= 0:
                path.append(previous[path[-1]])
            return path[::-1]
        for other in np.flatnonzero(movable[column] > ROUNDING).tolist():
            if other not in previous:
                previous[other] = column
                queue.append(other)
    return []
