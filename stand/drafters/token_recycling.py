"""Token Recycling: per token the target's latest best successors, unrolled into a fixed shape (arXiv 2408.08696)."""

from __future__ import annotations

import numpy as np

from stand.drafters.drafter import Drafter, DraftRequest, Lesson
from stand.drafters.settings import check_count
from stand.trees import NO_PARENT, NO_TOKEN, ROOT, DraftBatch, DraftTree, TreeShape


class TokenRecyclingDrafter(Drafter):
    """The adjacency table of section 3.1: the newest row of a token replaces the old one, whatever came before it.

    shape: slots that a draft may fill, by default `TreeShape.paper()`; the child of rank r takes the r-th best
    successor, and a slot whose token is not known stays empty with all below it. Deterministic: `match` is the rule for
    it.
    """

    rows_apart = True

    def __init__(self, shape: TreeShape | None = None, *, num_successors: int = 8) -> None:
        if shape is not None and not isinstance(shape, TreeShape):
            raise ValueError(f"shape must be a TreeShape, got {shape!r}; None takes TreeShape.paper()")
        check_count("num_successors", num_successors, 1, usual="the paper keeps 8")
        self.shape = TreeShape.paper() if shape is None else shape
        self.num_candidates = num_successors
        self._successors: dict[int, list[int]] = {}  # token: its successors, best first

    def typical_draft(self) -> DraftBatch:
        known = TokenRecyclingDrafter(self.shape)
        known._successors = dict.fromkeys(range(self.num_candidates), list(range(self.num_candidates)))
        return DraftBatch.concatenate([known._unroll(0, int(self.shape.depths.max()))])

    def most_nodes(self, num_rows: int) -> int:
        return num_rows * (self.shape.num_nodes - 1)

    def draft(self, request: DraftRequest) -> DraftBatch:
        """See `Drafter.draft`; nothing is drawn, so only the pending tokens and max_depths matter."""
        drafts = [
            self._unroll(int(history[-1]), int(depth))
            for history, depth in zip(request.histories, request.max_depths, strict=True)
        ]
        return DraftBatch.concatenate(drafts)

    def learn(self, lesson: Lesson) -> None:
        """Replace the successors of all scored tokens; of equal tokens the last one in the batch stays.

        The table holds what the target said; of a prompt it says nothing to the drafter.
        """
        successors = lesson.top_ids.tolist()  # a row of the array would keep all of it
        self._successors.update(zip(lesson.batch.token_ids.tolist(), successors, strict=True))

    def _unroll(self, pending: int, max_depth: int) -> DraftTree:
        """The draft below `pending`, at most `max_depth` deep."""
        tokens, parents, slots = [pending], [NO_PARENT], [ROOT]
        node_of_slot = {ROOT: 0}
        ranks, depths = self.shape.ranks, self.shape.depths
        for slot in range(1, self.shape.num_nodes):
            parent = node_of_slot.get(int(self.shape.parents[slot]))
            if parent is None or depths[slot] > max_depth:
                continue
            known = self._successors.get(tokens[parent], ())
            if ranks[slot] < len(known):
                node_of_slot[slot] = len(tokens)
                tokens.append(known[ranks[slot]])
                parents.append(parent)
                slots.append(slot)
        return _deterministic(tokens, parents, slots, ranks=ranks[slots])


def _deterministic(tokens: list[int], parents: list[int], slots: list[int], *, ranks: np.ndarray) -> DraftTree:
    """A draft whose children are given, not drawn: every law is a one-hot."""
    support_ids = np.full((len(tokens), int(ranks.max()) + 1), NO_TOKEN, dtype=np.int32)
    law = np.zeros(support_ids.shape, dtype=np.float32)
    for node in range(1, len(tokens)):
        support_ids[parents[node], ranks[node]] = tokens[node]
        law[node, ranks[node]] = 1.0
    return DraftTree(
        token_ids=np.array(tokens, dtype=np.int32),
        parents=np.array(parents, dtype=np.int32),
        support_ids=support_ids,
        law=law,
        slots=np.array(slots, dtype=np.int32),
    )
