"""One row's draft while it grows: laws of its nodes as a head gives them, and children drawn from these laws."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stand.trees import NO_PARENT, NO_TOKEN, ROOT, DraftTree

# Assumed overlap of the head's law and the target's at a node, besides the law's collision mass: the chance that a
# first drawn child is kept. It orders growth and takes no part in what is recorded.
OVERLAP = 0.75


@dataclass(slots=True)
class OpenNode:
    """A node whose law is known."""

    token_ids: np.ndarray  # [S] int32, the most likely first
    law: np.ndarray  # [S] float64, sums to 1
    is_taken: np.ndarray  # [S] bool
    left: float = 1.0  # estimated chance that none of the children so far is kept, where the node is


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

    def open(self, node: int, token_ids: np.ndarray, law: np.ndarray) -> None:
        """The law [S] over token_ids [S] of what follows `node`, in descending order."""
        law = law.astype(np.float64)
        self.nodes[node] = OpenNode(token_ids, law / law.sum(), np.zeros(len(law), dtype=bool))

    def next_chance(self, node: int) -> float:
        """Estimated chance that the next child of `node` is kept; 0 where there can be none."""
        opened = self.nodes.get(node)
        if opened is None or self.depths[node] >= self.max_depth:
            return 0.0
        rest = np.where(opened.is_taken, 0.0, opened.law)
        mass = rest.sum()
        if not mass > 0.0:
            return 0.0
        if self.is_greedy:
            return self.chances[node] * float(rest.max())
        return self.chances[node] * opened.left * self._share(opened, rest / mass)

    def reveal(self, node: int) -> int:
        """Draw the next child of `node`, whose `next_chance` must be above 0; its number."""
        opened, child = self.nodes[node], len(self.token_ids)
        rest = np.where(opened.is_taken, 0.0, opened.law)
        self.chances.append(self.next_chance(node))
        if self.is_greedy:
            place = int(rest.argmax())
            law = np.zeros(len(rest))
            law[place] = 1.0
        else:
            law = rest / rest.sum()
            cumulative = law.cumsum()
            place = int(np.searchsorted(cumulative, self.uniforms[child] * cumulative[-1], side="right"))
            opened.left *= 1.0 - self._share(opened, law)
        opened.is_taken[place] = True
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
            np.array(self.token_ids, dtype=np.int32), np.array(self.parents, dtype=np.int32), support_ids, law
        )

    def _share(self, opened: OpenNode, law: np.ndarray) -> float:
        """Chance that a child drawn from `law` is kept, where none before it was."""
        collision = float((law * law).sum())
        is_first = not opened.is_taken.any()
        return OVERLAP + (1.0 - OVERLAP) * collision if is_first else collision


def typical_tree(*, is_chain: bool) -> DraftTree:
    """A draft of two drawn tokens: below each other, or siblings."""
    draft = GrowingDraft(np.full(3, 0.5), max_depth=2, is_greedy=False, token_ids=[0])
    ids, law = np.array([1, 2, 3], dtype=np.int32), np.array([0.5, 0.3, 0.2])
    draft.open(ROOT, ids, law)
    first = draft.reveal(ROOT)
    draft.open(first, ids, law)
    draft.reveal(first if is_chain else ROOT)
    return draft.tree()
