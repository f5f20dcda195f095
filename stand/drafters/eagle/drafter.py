"""EAGLE as a drafter: trees of tokens drawn from the recorded laws of a trained head."""

from __future__ import annotations

from os import PathLike

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.drafters.blended import MOST_NODES, default_budget
from stand.drafters.drafter import Drafter, DraftRequest, Lesson
from stand.drafters.eagle.attached import attached
from stand.drafters.eagle.feature_head import FeatureHead
from stand.drafters.eagle.followed_rows import FollowedRows, NodeLaws
from stand.drafters.eagle.growth import BestFirstGrowth, FixedGrowth, Growth, Node
from stand.drafters.eagle.laws import MOST_RUNS
from stand.drafters.growing_draft import GrowingDraft, planted, typical_tree
from stand.drafters.heads.packed_run import RunRecorder
from stand.drafters.settings import check_count, check_temperature
from stand.trees import ROOT, DraftBatch, TreeShape


class EagleDrafter(Drafter):
    """Drafts by a trained head that extrapolates the target's features (EAGLE-1, arXiv 2401.15077; EAGLE-3, arXiv
    2503.01840).

    head: an `EagleHead`, `Eagle3Head` or `MtpHead` of the target, or the file or folder of a checkpoint, read when the
    engine is made; "mtp": the multi-token-prediction layer of the target's own checkpoint.
    budget: the most nodes of all rows of a step together; None: `default_budget` of the model.
    runs: the most times that the head runs in a step, each time on all rows; drafts are at most so deep. None: 6. The
    paper's tree takes 5.
    shape: slots that every row's draft fills instead, whatever the laws say, such as the paper's `PAPER_SHAPE`; budget
    and runs then follow from it and are refused.
    temperature, num_candidates: a law is the head's at `temperature` over its `num_candidates` best tokens,
    renormalised before the draw: what is recorded is what was drawn from. `temperature` is best the target's own; under
    greedy decoding the best tokens are drafted as they are.

    Nothing is learned while it drafts: drafts are a function of the rows' texts and random numbers. One drafter serves
    one engine at a time.

    Raises ValueError for settings out of range.
    """

    remembers = False
    requires_features = True

    def __init__(
        self,
        head: FeatureHead | str | PathLike,
        *,
        budget: int | None = None,
        runs: int | None = None,
        shape: TreeShape | None = None,
        temperature: float = 1.0,
        num_candidates: int = 32,
    ) -> None:
        if shape is not None and not isinstance(shape, TreeShape):
            raise ValueError(f"shape must be a TreeShape, got {shape!r}; PAPER_SHAPE is the paper's")
        if shape is not None and (budget, runs) != (None, None):
            raise ValueError(f"budget and runs follow from the shape, got budget={budget}, runs={runs}; leave them out")
        runs = MOST_RUNS if runs is None else runs
        if budget is not None:
            check_count("budget", budget, 0, MOST_NODES, usual="32 to 128 nodes are usual")
        check_count("runs", runs, 1, usual="5 or 6 are usual")
        check_temperature(temperature)
        check_count("num_candidates", num_candidates, 1, usual="32 is usual")
        self.head = head
        self.budget = budget
        self._default_budget: int | None = None  # of the model
        self.shape = shape
        self.runs = runs if shape is None else max(shape.max_depth, 1)
        self.temperature = temperature
        self.law_size = num_candidates
        self._rows: FollowedRows | None = None

    def attach(self, model: PreTrainedModel, fingerprint: bytes) -> None:
        self.head = attached(model, self.head)
        self.feature_layers = self.head.feature_layers
        self._default_budget = default_budget(model)
        self._rows = FollowedRows(model, self.head, temperature=self.temperature, count=self.law_size)

    def record_runs(self, recorder: RunRecorder | None) -> None:
        self._rows.record_runs(recorder)

    def typical_draft(self) -> DraftBatch:
        is_chain = self.shape is not None and not (self.shape.num_children > 1).any()
        width = min(self.law_size, self.head.num_guessed)
        return DraftBatch.concatenate([typical_tree(width, is_chain=is_chain, follows_shape=self.shape is not None)])

    def follow_prompt(self, token_ids: np.ndarray, features: torch.Tensor) -> None:
        self._rows.follow_prompt(token_ids, features)

    def follow(self, lesson: Lesson) -> None:
        self._rows.follow(lesson)

    def most_nodes(self, num_rows: int) -> int:
        if self.shape is not None:
            return num_rows * (self.shape.num_nodes - 1)
        return self._default_budget if self.budget is None else self.budget

    @torch.inference_mode()
    def draft(self, request: DraftRequest) -> DraftBatch:
        """One tree per row; see `Drafter.draft`. A row of one token has no feature yet and gets no draft."""
        most = self.most_nodes(len(request.histories))
        growth: Growth = BestFirstGrowth(most) if self.shape is None else FixedGrowth(self.shape)
        drafts = planted(request, growth.num_nodes)
        rows, laws = self._rows.catch_up(request.histories)
        asked = [(row, ROOT) for row in rows.tolist()]
        written = [{ROOT: None} for _ in drafts]  # per row: its nodes that the head has seen, numbered as they came
        features: dict[Node, torch.Tensor] = {}  # of these nodes, as estimated
        for remaining in reversed(range(self.runs)):
            if asked:
                _open(drafts, asked, laws)
                features |= zip(asked, laws.estimates, strict=True)
            asked = growth.grow(drafts, is_last=False) if remaining else []
            if not asked:
                growth.grow(drafts, is_last=True)
                break
            laws = self._extend(drafts, asked, written, features)
        return DraftBatch.concatenate([draft.tree() for draft in drafts])

    def _extend(
        self, drafts: list[GrowingDraft], nodes: list[Node], written: list[dict], features: dict[Node, torch.Tensor]
    ) -> NodeLaws:
        """The head on drafted nodes."""
        above = [(row, drafts[row].parents[node]) for row, node in nodes]
        parents = [written[row][parent] for row, parent in above]
        for row, node in nodes:
            written[row][node] = len(written[row]) - 1
        return self._rows.extend(
            [row for row, _ in nodes],
            [drafts[row].token_ids[node] for row, node in nodes],
            parents,
            [features[node] for node in above],
        )


def _open(drafts: list[GrowingDraft], nodes: list[Node], laws: NodeLaws) -> None:
    """Give `nodes` their laws."""
    for (row, node), ids, law in zip(nodes, laws.ids, laws.probs, strict=True):
        drafts[row].open(node, ids, law)
