"""Rows, prompts and branches of drafts as sequences of llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import finalize

import numpy as np
import torch

from stand.forward.cache.tree_cache import TreeCache
from stand.forward.packed_plan import StepPlan
from stand.plugins.llama_cpp.context import Context


@dataclass(slots=True)
class _Branches:
    """Of one row's draft in the last step: for each leaf its sequence and the nodes on the way to it."""

    sequences: list[int]  # the first one is the row's own
    paths: np.ndarray  # [leaves, nodes] bool


class SequenceCache(TreeCache):
    """Rows whose keys lie in cells of a context; what is `TreeCache`'s own storage stays empty.

    Before a step the branches of a row's draft but the first begin as copies of the row's sequence. After it the row
    goes on as the branch of the kept path, and the others are given back.
    """

    def __init__(self, context: Context, num_rows: int, *, token_bytes: int):
        super().__init__(num_rows, 0)
        self._token_bytes = token_bytes
        self._context = context
        self._rows: list[int | None] = [None] * num_rows  # sequences
        self._ends = [0] * num_rows  # positions that they hold
        self._branches: dict[int, _Branches] = {}  # by row
        self._held: set[int] = set()  # sequences
        context.caches.add(self)
        finalize(self, context.abandon, self._held)

    @property
    def num_slots(self) -> int:
        """That its rows fill; of keys that rows share, each counts its own."""
        return sum(self._ends)

    @property
    def nbytes(self) -> int:
        return self.num_slots * self._token_bytes

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan

    def run(self, plan: StepPlan, num_outputs: int) -> torch.Tensor:
        """Logits [num_outputs, V] of the last tokens of the plan that has begun, valid until the next run."""
        owners: list[list[int]] = []
        for place, length in enumerate(plan.lengths.tolist()):
            row = plan.first_row + place
            self._roll_back(row, length)
            first, end = plan.offsets[place : place + 2].tolist()
            owners += self._owners(row, length, plan, first, end)
            self._ends[row] = length + 1 + int(plan.depths[first:end].max())
        positions = np.repeat(plan.lengths, np.diff(plan.offsets)) + plan.depths
        logits = self._context.decode(plan.token_ids, positions, owners, num_outputs=num_outputs)
        return torch.from_numpy(logits)

    def keep_states(self, ends: Sequence[int]) -> None:
        """Each row goes on as the path to token ends[a], row-local, of its draft."""
        for place, end in enumerate(ends):
            row = self._plan.first_row + place
            self._keep(row, int(self._plan.lengths[place]), end)

    def enter(self, row: int, prefilled: TreeCache, length: int) -> None:
        self.leave(row)
        if length > 0:
            self._context.copy(prefilled.sequence(0), self.sequence(row), 0, length)
        self._ends[row] = length

    def leave(self, row: int) -> None:
        self._roll_back(row, 0)
        if self._rows[row] is not None:
            self._give_back(self._rows[row])
            self._rows[row] = None

    def move(self, source: int, target: int, length: int) -> None:
        self.leave(target)
        self._rows[target], self._ends[target] = self._rows[source], self._ends[source]
        self._rows[source], self._ends[source] = None, 0

    def sequence(self, row: int) -> int:
        """That of a row, which has one from now on."""
        if self._rows[row] is None:
            self._rows[row] = self._take()
        return self._rows[row]

    def _owners(self, row: int, length: int, plan: StepPlan, first: int, end: int) -> list[list[int]]:
        """By token of a row, the sequences that it belongs to: of the leaves below it."""
        own = self.sequence(row)
        if plan.is_prompt or end - first == 1:
            return [[own]] * (end - first)
        seen = plan.ancestors[first:end, : end - first]  # by node: itself and its ancestors
        paths = seen[seen.sum(axis=0) == 1]  # a leaf is seen by itself alone
        sequences = [own, *(self._take() for _ in paths[1:])]
        for sequence in sequences[1:]:
            self._context.copy(own, sequence, 0, length)
        self._branches[row] = _Branches(sequences, paths)
        return [[sequences[leaf] for leaf in np.flatnonzero(below).tolist()] for below in paths.T]

    def _keep(self, row: int, length: int, end: int) -> None:
        own, branches, kept = self.sequence(row), self._branches.pop(row, None), length + 1
        if branches is not None:
            leaf = int(branches.paths[:, end].argmax())  # the first one below the end of the path
            kept += int(branches.paths[leaf, 1 : end + 1].sum())
            if leaf > 0:
                self._context.remove(own, length)
                self._context.copy(branches.sequences[leaf], own, length, kept)
            for sequence in branches.sequences[1:]:
                self._give_back(sequence)
        if self._ends[row] > kept:
            self._context.remove(own, kept)
        self._ends[row] = kept

    def _roll_back(self, row: int, length: int) -> None:
        """To so many positions: what a step has left of which nothing was kept."""
        if row in self._branches:
            for sequence in self._branches.pop(row).sequences[1:]:
                self._give_back(sequence)
        if self._ends[row] > length:
            self._context.remove(self.sequence(row), length)
            self._ends[row] = length

    def _take(self) -> int:
        sequence = self._context.take()
        self._held.add(sequence)
        return sequence

    def _give_back(self, sequence: int) -> None:
        self._held.remove(sequence)
        self._context.give_back(sequence)
