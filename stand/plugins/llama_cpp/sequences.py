"""Rows, prompts and branches of drafts as sequences of llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import finalize

import numpy as np
import torch

from stand.forward.cache.tree_cache import TreeCache
from stand.forward.packed_plan import StepPlan
from stand.plugins.llama_cpp.context import Context


@dataclass(slots=True)
class _Branch:
    """A sequence for a branch of a row's drafts. It holds the row's cells up to position `end`, so that what it lacks
    is copied when it is used again: to copy all of a long text takes 20 times as long."""

    sequence: int
    end: int = 0


@dataclass(slots=True)
class _Row:
    """Of its draft in the last step, until what was kept is known: `paths` [leaves, nodes] bool, the nodes on the way
    to each leaf, the first of which is the row's own sequence's."""

    sequence: int
    end: int = 0  # positions that it holds
    branches: list[_Branch] = field(default_factory=list)
    paths: np.ndarray | None = None

    @property
    def num_used(self) -> int:
        """Branches that the draft has."""
        return 0 if self.paths is None else len(self.paths) - 1


class SequenceCache(TreeCache):
    """Rows whose keys lie in cells of a context; what is `TreeCache`'s own storage stays empty.

    Before a step every leaf of a row's draft gets a sequence that holds the row's cells. After it the row goes on as
    the one of the kept path.
    """

    def __init__(self, context: Context, *, token_bytes: int, has_windows: bool):
        super().__init__(0, 0)
        self.has_windows = has_windows
        self._token_bytes = token_bytes
        self._context = context
        self._rows: dict[int, _Row] = {}
        self._held: set[int] = set()  # sequences
        context.caches.add(self)
        finalize(self, context.abandon, self._held)

    @property
    def num_slots(self) -> int:
        """That its rows fill; of keys that rows share, each counts its own."""
        return sum(row.end for row in self._rows.values())

    @property
    def nbytes(self) -> int:
        return self.num_slots * self._token_bytes

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan

    def run(self, plan: StepPlan, num_outputs: int) -> torch.Tensor:
        """Logits [num_outputs, V] of the last tokens of the plan that has begun."""
        owners: list[list[int]] = []
        for place, length in enumerate(plan.lengths.tolist()):
            row = self._row(plan.first_row + place)
            self._roll_back(row, length)
            first, end = plan.offsets[place : place + 2].tolist()
            owners += self._owners(row, plan, first, end)
            row.end = length + 1 + int(plan.depths[first:end].max())
        positions = np.repeat(plan.lengths, np.diff(plan.offsets)) + plan.depths
        logits = self._context.decode(plan.token_ids, positions, owners, num_outputs=num_outputs)
        return torch.from_numpy(logits).clone()  # llama.cpp writes the next ones over them

    def keep_states(self, ends: Sequence[int]) -> None:
        """Each row goes on as the path to token ends[a], row-local, of its draft."""
        for place, end in enumerate(ends):
            self._keep(self._row(self._plan.first_row + place), int(self._plan.lengths[place]), end)

    def enter(self, row: int, prefilled: SequenceCache, length: int) -> None:
        self.leave(row)
        entered = self._row(row)
        if length > 0:
            self._context.copy(prefilled._row(0).sequence, entered.sequence, 0, length)
        entered.end = length

    def leave(self, row: int) -> None:
        left = self._rows.pop(row, None)
        if left is not None:
            for sequence in (left.sequence, *(branch.sequence for branch in left.branches)):
                self._give_back(sequence)

    def move(self, source: int, target: int, length: int) -> None:
        self.leave(target)
        self._rows[target] = self._rows.pop(source)

    def give_back_idle(self) -> None:
        """Branches that no draft has."""
        for row in self._rows.values():
            while len(row.branches) > row.num_used:
                self._give_back(row.branches.pop().sequence)

    def _row(self, row: int) -> _Row:
        if row not in self._rows:
            self._rows[row] = _Row(self._take())
        return self._rows[row]

    def _owners(self, row: _Row, plan: StepPlan, first: int, end: int) -> list[list[int]]:
        """By token of a row, the sequences that it belongs to: of the leaves below it."""
        if plan.is_prompt or end - first == 1:
            return [[row.sequence]] * (end - first)
        seen = plan.ancestors[first:end, : end - first]  # by node: itself and its ancestors
        row.paths = seen[seen.sum(axis=0) == 1]  # a leaf is seen by itself alone
        while len(row.branches) < row.num_used:
            row.branches.append(_Branch(self._take()))
        sequences = [row.sequence]
        for branch in row.branches[: row.num_used]:
            if branch.end < row.end:
                self._context.copy(row.sequence, branch.sequence, branch.end, row.end)
                branch.end = row.end
            sequences.append(branch.sequence)
        return [[sequences[leaf] for leaf in np.flatnonzero(below).tolist()] for below in row.paths.T]

    def _keep(self, row: _Row, length: int, end: int) -> None:
        kept = length + 1  # the root stays
        if row.paths is not None:
            leaf = int(row.paths[:, end].argmax())  # the first one below the end of the path
            kept = length + int(row.paths[leaf, : end + 1].sum())
            if leaf > 0:
                self._context.remove(row.sequence, length)
                self._context.copy(row.branches[leaf - 1].sequence, row.sequence, length, kept)
            self._cut(row, length)
        if row.end > kept:
            self._context.remove(row.sequence, kept)
        row.end = kept

    def _roll_back(self, row: _Row, length: int) -> None:
        """To so many positions: what a step has left of which nothing was kept."""
        self._cut(row, length)
        if row.end > length:
            self._context.remove(row.sequence, length)
            row.end = length

    def _cut(self, row: _Row, length: int) -> None:
        """The draft is over: its branches go back to the row's own positions. Where there are windows, cells that all
        have left behind go at different times, and a branch must have those that its row has."""
        for branch in row.branches[: row.num_used]:
            self._context.remove(branch.sequence, length)
        row.paths = None
        if self.has_windows:
            while row.branches:
                self._give_back(row.branches.pop().sequence)

    def _take(self) -> int:
        sequence = self._context.take()
        self._held.add(sequence)
        return sequence

    def _give_back(self, sequence: int) -> None:
        self._held.remove(sequence)
        self._context.give_back(sequence)
