"""The nodes that a source was asked about in one step, with the laws that it gave there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np

from stand.trees import NO_PARENT, ROOT, DraftBatch, OutsideLaws

Place = tuple[int, int, int]  # (row, node above, token)
Estimate = TypeVar("Estimate")  # of the target's feature after a node


class LawTrees(Generic[Estimate]):
    """One tree per row, node 0 its pending token. Nodes are numbered as they come, row by row."""

    def __init__(self, num_rows: int) -> None:
        self._rows: list[int] = []
        self._parents: list[int] = []
        self._tokens: list[int] = []
        self._places: list[dict[tuple[int, int], int]] = [{} for _ in range(num_rows)]  # by node above and token
        self._sizes = [0] * num_rows
        self._estimates: list[list[Estimate]] = [[] for _ in range(num_rows)]
        self._ids: list[np.ndarray] = []
        self._probs: list[np.ndarray] = []

    def add(self, places: Sequence[Place], estimates: Iterable[Estimate], ids: np.ndarray, probs: np.ndarray) -> None:
        """Nodes with n estimates of the features after them and their laws, ids and probs [n, K]."""
        for (row, parent, token), estimate in zip(places, estimates, strict=True):
            self._places[row][parent, token] = self._sizes[row]
            self._sizes[row] += 1
            self._rows.append(row)
            self._parents.append(parent)
            self._tokens.append(token)
            self._estimates[row].append(estimate)
        self._ids.append(ids)
        self._probs.append(probs)

    def estimates_at(self, places: Sequence[Place]) -> list[Estimate]:
        """Those of the nodes above."""
        return [self._estimates[row][parent] for row, parent, _ in places]

    def frontier(self, planned: DraftBatch, max_depths: np.ndarray) -> list[Place]:
        """Planned nodes just below the trees, where a child could be likelier than the last planned node."""
        paths, depths = planned.path_probabilities, planned.depths
        least = float(paths.min())
        found = []
        for row, size in enumerate(self._sizes):
            if size == 0:
                continue
            first, known = int(planned.offsets[row]), {ROOT: ROOT}
            for node in range(1, int(planned.offsets[row + 1]) - first):
                parent = known.get(int(planned.parents[first + node]))
                if parent is None:
                    continue
                token = int(planned.token_ids[first + node])
                place = self._places[row].get((parent, token))
                if place is not None:
                    known[node] = place
                elif paths[first + node] > least and depths[first + node] < max_depths[row]:
                    found.append((row, parent, token))
        return found

    def laws(self, source: int) -> OutsideLaws:
        """All nodes so far."""
        rows = np.array(self._rows, dtype=np.int64)
        order = np.argsort(rows, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(self._sizes)]).astype(np.int32)
        parents, tokens = np.array(self._parents, np.int32), np.array(self._tokens, np.int32)
        ids, probs = np.concatenate(self._ids), np.concatenate(self._probs)
        return OutsideLaws(offsets, parents[order], tokens[order], ids[order], probs[order], source=source)


def roots(rows: Sequence[int], histories: Sequence[np.ndarray]) -> list[Place]:
    """The pending tokens of `rows`."""
    return [(row, NO_PARENT, int(histories[row][-1])) for row in rows]
