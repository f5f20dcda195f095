"""One row's draft while it grows: laws of its nodes as a head gives them, and children drawn from these laws."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stand.drafters.drafter import DraftRequest
from stand.trees import NO_PARENT, NO_TOKEN, ROOT, DraftTree
from stand.trees.noise import DRAFT, uniforms

# Assumed overlap of the head's law and the target's at a node, besides the law's collision mass: the chance that a
# first drawn child is kept. It orders growth and takes no part in what is recorded. It was not tuned: the best token of
# the bundled model's head is the target's at 0.77 of held-out places (LOG.md).
HEAD_OVERLAP = 0.75


class OpenNode:
    """A node whose law is known: what its next child is drawn from."""

    __slots__ = ("law", "left", "share", "token_ids", "_is_greedy", "_num_taken")

    def __init__(self, token_ids: np.ndarray, law: np.ndarray, *, is_greedy: bool) -> None:
        """token_ids [S] int32 and law [S], of any sum, of 0 where it was not finite; is_greedy: the next child is the
        most likely token."""
        self.token_ids = token_ids
        self.law = law.astype(np.float64)  # without the tokens of the children so far; all zero where there are no more
        self.left = 1.0  # estimated chance that none of the children so far is kept, where the node is
        self._is_greedy = is_greedy
        self._num_taken = 0
        self._settle()

    def take(self, place: int) -> None:
        """The token at `place` is a child's."""
        self.left *= 1.0 - self.share
        self._num_taken += 1
        self.law = self.law.copy()  # the old one is recorded
        self.law[place] = 0.0
        self._settle()

    def _settle(self) -> None:
        """`law` sums to 1 again; `share` is the estimated chance that the next child is kept, where none before was."""
        mass = self.law.sum()
        if not mass > 0.0:
            self.share = 0.0
            return
        self.law = self.law / mass
        collision = float(self.law @ self.law)
        if self._is_greedy:
            self.share = float(self.law.max())
        else:
            self.share = collision if self._num_taken else HEAD_OVERLAP + (1.0 - HEAD_OVERLAP) * collision


@dataclass(slots=True)
class GrowingDraft:
    """Nodes are revealed one by one. Each draws its token from its parent's law without the tokens of its siblings, by
    a random number of its own, so the draft is adapted as long as whoever chooses the parent looks at nothing else.

    `chances` are estimates that a node is kept. Under greedy decoding children are the best tokens, in order.
    """

    uniforms: np.ndarray  # [most nodes] float64: one for every node, by its number
    max_depth: int
    is_greedy: bool
    token_ids: list[int]
    parents: list[int] = field(default_factory=lambda: [NO_PARENT])
    depths: list[int] = field(default_factory=lambda: [0])
    chances: list[float] = field(default_factory=lambda: [1.0])
    laws: list[np.ndarray | None] = field(default_factory=lambda: [None])
    nodes: dict[int, OpenNode] = field(default_factory=dict)  # those whose laws are known
    slots: list[int] | None = None  # of the shape that is followed, by node

    def open(self, node: int, token_ids: np.ndarray, law: np.ndarray) -> None:
        """The law [S] over token_ids [S] of what follows `node`; see `OpenNode`."""
        self.nodes[node] = OpenNode(token_ids, law, is_greedy=self.is_greedy)

    def next_chance(self, node: int) -> float:
        """Estimated chance that the next child of `node` is kept; 0 where there can be none."""
        opened = self.nodes.get(node)
        if opened is None or self.depths[node] >= self.max_depth:
            return 0.0
        return self.chances[node] * opened.left * opened.share

    def reveal(self, node: int) -> int:
        """Draw the next child of `node`, whose `next_chance` must be above 0; its number."""
        opened, child = self.nodes[node], len(self.token_ids)
        self.chances.append(self.next_chance(node))
        if self.is_greedy:
            place = int(opened.law.argmax())
            law = np.zeros(len(opened.law))
            law[place] = 1.0
        else:
            law = opened.law
            cumulative = law.cumsum()
            place = int(cumulative.searchsorted(self.uniforms[child] * cumulative[-1], side="right"))
        opened.take(place)
        self.token_ids.append(int(opened.token_ids[place]))
        self.parents.append(node)
        self.depths.append(self.depths[node] + 1)
        self.laws.append(law)
        return child

    def tree(self) -> DraftTree:
        """All nodes, with the laws that they were drawn from."""
        width = max((len(opened.law) for opened in self.nodes.values()), default=1)
        support_ids = np.full((len(self.token_ids), width), NO_TOKEN, dtype=np.int32)
        law = np.zeros(support_ids.shape, dtype=np.float32)
        for node in range(1, len(self.token_ids)):
            parent = self.parents[node]
            support_ids[parent, : len(self.laws[node])] = self.nodes[parent].token_ids
            law[node, : len(self.laws[node])] = self.laws[node]
        return DraftTree(
            np.array(self.token_ids, dtype=np.int32),
            np.array(self.parents, dtype=np.int32),
            support_ids,
            law,
            slots=None if self.slots is None else np.array(self.slots, dtype=np.int32),
        )


def grow_best_first(
    drafts: Sequence[GrowingDraft],
    law_of: Callable[[int, int], tuple[np.ndarray, np.ndarray] | None],
    budget: int,
    *,
    most_children: int | None = None,
) -> None:
    """Reveal at most `budget` nodes, the most likely next child of all rows first.

    law_of: of a row and a node of its draft, tokens and law [S] of what follows it; without, nothing follows.
    most_children: of a node.
    """
    heap: list[tuple[float, int, int]] = []  # (-chance of the next child, row, node)
    num_children = Counter[tuple[int, int]]()

    def push(row: int, node: int) -> None:
        chance = drafts[row].next_chance(node)
        if chance > 0.0 and (most_children is None or num_children[row, node] < most_children):
            heapq.heappush(heap, (-chance, row, node))

    def open_node(row: int, node: int) -> None:
        law = law_of(row, node)
        if law is not None:
            drafts[row].open(node, *law)
            push(row, node)

    for row in range(len(drafts)):
        open_node(row, ROOT)
    for _ in range(budget):
        if not heap:
            break
        _, row, node = heapq.heappop(heap)
        num_children[row, node] += 1
        open_node(row, drafts[row].reveal(node))
        push(row, node)


def planted(request: DraftRequest, num_nodes: int) -> list[GrowingDraft]:
    """Drafts of the pending tokens alone, with random numbers for `num_nodes` nodes each."""
    nodes = np.arange(num_nodes)
    points = uniforms(request.seed, DRAFT, request.noise_keys[:, None], request.steps[:, None], nodes[None])
    return [
        GrowingDraft(points[row], int(depth), request.is_greedy, [int(history[-1])])
        for row, (history, depth) in enumerate(zip(request.histories, request.max_depths, strict=True))
    ]


def typical_tree(width: int, *, is_chain: bool, follows_shape: bool = False) -> DraftTree:
    """A draft of two tokens drawn from laws over `width` tokens: below each other, or siblings if there can be two."""
    draft = GrowingDraft(np.full(3, 0.5), max_depth=2, is_greedy=False, token_ids=[0])
    ids, law = np.arange(width, dtype=np.int32), np.ones(width)
    draft.open(ROOT, ids, law)
    first = draft.reveal(ROOT)
    draft.open(first, ids, law)
    draft.reveal(first if is_chain or width == 1 else ROOT)
    draft.slots = [0, 1, 2] if follows_shape else None
    return draft.tree()
