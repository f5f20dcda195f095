"""Speculative Streaming as a drafter: trees of tokens drawn from the recorded laws of the streams."""

from __future__ import annotations

from os import PathLike

from transformers import PreTrainedModel

from stand.drafters.blended import MOST_NODES, default_budget
from stand.drafters.drafter import Drafter, DraftRequest
from stand.drafters.growing_draft import grow_best_first, planted, typical_tree
from stand.drafters.settings import check_count
from stand.drafters.streams.rider import Law, StreamRider
from stand.drafters.streams.weights import Streams
from stand.trees import DraftBatch


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
        laws = self.rider.laws_of(request)

        def law_of(row: int, node: int) -> Law | None:
            """Of stream d + 1 at a node of depth d."""
            depth, law = drafts[row].depths[node], laws[row]
            return None if law is None or depth >= len(law[0]) else (law[0][depth], law[1][depth])

        grow_best_first(drafts, law_of, budget)
        return DraftBatch.concatenate([draft.tree() for draft in drafts])
