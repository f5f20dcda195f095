"""Speculative Streaming as a drafter: trees of tokens drawn from the recorded laws of the streams."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from os import PathLike

from transformers import PreTrainedModel

from stand.drafters.blended import MOST_NODES, default_budget
from stand.drafters.drafter import Drafter, DraftRequest
from stand.drafters.growing_draft import GrowingDraft, planted, typical_tree
from stand.drafters.settings import check_count
from stand.drafters.streams.rider import Law, StreamRider
from stand.drafters.streams.weights import Streams
from stand.trees import ROOT, DraftBatch


class StreamingDrafter(Drafter):
    """Drafts by streams beside a frozen target (Speculative Streaming, arXiv 2402.11131, the lossless form).

    streams: `Streams` of the target, or the file or folder that they were saved in, read when the engine is made.
    budget: the most nodes of all rows of a step together, the most likely first; None: `default_budget` of the model.
    Drafts are at most gamma deep.
    temperature, num_candidates: a law is a stream's at `temperature` over its `num_candidates` best tokens,
    renormalised before the draw: what is recorded is what was drawn from. `temperature` is best the target's own; under
    greedy decoding the best tokens are drafted as they are.
    placement: "end" runs the streams after the verdict, at the end of the kept path; "nodes" in the step's forward, at
    every node (`StreamRider`). The drafts are the same.

    A stream's law does not depend on the token that it comes after: nodes of one depth share it. The first step of a
    row has no draft. The paper prunes its tree in the middle of the forward by an early exit; here nothing that was
    drawn may be dropped, and trees are grown under a budget instead. Nothing is learned while it drafts. One drafter
    serves one engine at a time.

    Raises ValueError for settings out of range.
    """

    remembers = False

    def __init__(
        self,
        streams: Streams | str | PathLike,
        *,
        budget: int | None = None,
        temperature: float = 1.0,
        num_candidates: int = 32,
        placement: str = "end",
    ) -> None:
        if budget is not None:
            check_count("budget", budget, 0, MOST_NODES, usual="32 to 128 nodes are usual")
        self.budget = budget
        self._default_budget: int | None = None  # of the model
        self.rider = StreamRider(
            streams, placement=placement, temperature=temperature, num_candidates=num_candidates
        )  # fmt: skip

    def attach(self, model: PreTrainedModel, fingerprint: bytes) -> None:
        self.rider.attach(model)
        self._default_budget = default_budget(model)

    def typical_draft(self) -> DraftBatch:
        return DraftBatch.concatenate([typical_tree(self.rider.law_size, is_chain=False)])

    def most_nodes(self, num_rows: int) -> int:
        return self._default_budget if self.budget is None else self.budget

    def draft(self, request: DraftRequest) -> DraftBatch:
        """One tree per row; see `Drafter.draft`."""
        budget = self.most_nodes(len(request.histories))
        drafts = planted(request, budget + 1)
        grow(drafts, self.rider.laws_of(request), budget)
        return DraftBatch.concatenate([draft.tree() for draft in drafts])


def grow(drafts: Sequence[GrowingDraft], laws: Sequence[Law | None], budget: int) -> None:
    """Reveal at most `budget` nodes, the most likely next child of all rows first. Row i's nodes of depth d open with
    the law of its stream d + 1; without laws a draft stays as it is."""
    heap: list[tuple[float, int, int]] = []  # (-chance of the next child, row, node)

    def push(row: int, node: int) -> None:
        chance = drafts[row].next_chance(node)
        if chance > 0.0:
            heapq.heappush(heap, (-chance, row, node))

    def open_node(row: int, node: int) -> None:
        depth, (ids, probs) = drafts[row].depths[node], laws[row]
        if depth < len(ids):
            drafts[row].open(node, ids[depth], probs[depth])
            push(row, node)

    for row, law in enumerate(laws):
        if law is not None:
            open_node(row, ROOT)
    for _ in range(budget):
        if not heap:
            break
        _, row, node = heapq.heappop(heap)
        open_node(row, drafts[row].reveal(node))
        push(row, node)
