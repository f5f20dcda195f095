"""Which nodes a step's drafts reveal, and which of them the head is run on: few runs, each one batch of all rows."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence

from stand.drafters.growing_draft import GrowingDraft
from stand.trees import ROOT, TreeShape

Node = tuple[int, int]  # (row, number within its draft)

# EAGLE-1's tree: 25 nodes down to depth 5 (arXiv 2401.15077, figure 7; 4, 8, 8, 3 and 2 nodes by depth).
PAPER_SHAPE = TreeShape.parse("parents:-1,0,0,0,0,1,1,1,2,2,3,3,4,5,5,5,6,6,7,7,8,13,13,13,21,21")


class Growth(ABC):
    """One step's growth. A round reveals nodes below those whose laws are known; which of the new ones get laws for the
    next round follows from what is revealed."""

    num_nodes: int  # the most nodes of a row, root included

    @abstractmethod
    def grow(self, drafts: Sequence[GrowingDraft], *, is_last: bool) -> list[Node]:
        """Reveal the nodes of one run; those that the head is to be run on next, by row, parents in earlier runs."""


class BestFirstGrowth(Growth):
    """The most likely nodes first, under one budget for all rows.

    True best-first growth would run the head once per node. Here a round goes on as long as the best node that can be
    revealed is at least PATIENCE times as likely as the best new node, whose own children may be as likely as itself;
    the last round reveals what the budget still holds. All new nodes are run, for the best come first: each is at least
    as likely as any node that could be revealed without.
    """

    PATIENCE = 0.5

    def __init__(self, budget: int) -> None:
        self.num_nodes = budget + 1
        self._room = budget
        self._open: list[tuple[float, int, int]] = []  # heap of (-chance of the next child, row, node)
        self._asked: list[Node] | None = None  # whose laws are known by the next round; None: the roots'

    def grow(self, drafts: Sequence[GrowingDraft], *, is_last: bool) -> list[Node]:
        asked = [(row, ROOT) for row in range(len(drafts))] if self._asked is None else self._asked
        for row, node in asked:
            self._push(drafts, row, node)
        best_new, revealed = 0.0, []
        while self._room and self._open and (is_last or -self._open[0][0] >= self.PATIENCE * best_new):
            _, row, node = heapq.heappop(self._open)
            child = drafts[row].reveal(node)
            self._room -= 1
            self._push(drafts, row, node)
            if drafts[row].depths[child] < drafts[row].max_depth:
                revealed.append((row, child))
                best_new = max(best_new, drafts[row].chances[child])
        self._asked = [] if is_last or not self._room else sorted(revealed)
        return self._asked

    def _push(self, drafts: Sequence[GrowingDraft], row: int, node: int) -> None:
        chance = drafts[row].next_chance(node)
        if chance > 0.0:
            heapq.heappush(self._open, (-chance, row, node))


class FixedGrowth(Growth):
    """A shape, depth by depth: every slot takes the next child of its parent's slot, whatever the laws say."""

    def __init__(self, shape: TreeShape) -> None:
        self.num_nodes = shape.num_nodes
        self._children: list[list[int]] = [[] for _ in range(shape.num_nodes)]
        for slot in range(1, shape.num_nodes):
            self._children[shape.parents[slot]].append(slot)
        self._level: list[tuple[int, int, int]] | None = None  # (row, node, slot) with laws by the next round

    def grow(self, drafts: Sequence[GrowingDraft], *, is_last: bool) -> list[Node]:
        if self._level is None:
            self._level = [(row, ROOT, ROOT) for row in range(len(drafts))]
            for draft in drafts:
                draft.slots = [ROOT]
        revealed = []
        for row, node, slot in self._level:
            for child in self._children[slot]:
                if drafts[row].next_chance(node) > 0.0:
                    revealed.append((row, drafts[row].reveal(node), child))
                    drafts[row].slots.append(child)
        self._level = [] if is_last else [
            (row, node, slot) for row, node, slot in revealed
            if self._children[slot] and drafts[row].depths[node] < drafts[row].max_depth
        ]  # fmt: skip
        return [(row, node) for row, node, _ in self._level]
