"""EAGLE as a source of laws: the default drafter blends what the head says with what the lookup has seen."""

from __future__ import annotations

from os import PathLike

import torch
from transformers import PreTrainedModel

from stand.drafters.drafter import DraftRequest
from stand.drafters.eagle.attached import attached
from stand.drafters.eagle.feature_head import FeatureHead
from stand.drafters.eagle.followed_rows import FollowedRows, NodeLaws
from stand.drafters.heads.followed_laws import FollowedLaws
from stand.drafters.law_source import Planner
from stand.drafters.law_trees import LawTrees, Place, roots
from stand.drafters.paying_runs import PayingRuns, laws_of_runs
from stand.drafters.settings import check_count, check_temperature
from stand.trees import ROOT, DraftBatch, OutsideLaws

MOST_RUNS = 6  # of the head per step


class EagleLaws(FollowedLaws):
    """Laws of a trained head (EAGLE-1, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840) for `BlendedDrafter(source=...)`.

    head: an `EagleHead`, `Eagle3Head` or `MtpHead` of the target, or the file or folder of a checkpoint, read when the
    engine is made; "mtp": the multi-token-prediction layer of the target's own checkpoint.
    runs: the most times that the head runs in a step, each time on all rows as one batch: first at the pending tokens,
    then on planned nodes that it has not seen. None: as often as it pays (`PayingRuns`), or not at all; by measured
    time, or in calls with a seed by what a run reads and does.
    temperature, num_candidates: a law is the head's at `temperature`, its `num_candidates` best tokens. `temperature`
    is best the target's own, 1 under greedy decoding; what is wrong with it is learned.
    source: 0..3; a lookup learns apart what each source is worth.

    One object serves one engine at a time. Raises ValueError for settings out of range.
    """

    def __init__(
        self,
        head: FeatureHead | str | PathLike,
        *,
        runs: int | None = None,
        temperature: float = 1.0,
        num_candidates: int = 10,
        source: int = 0,
    ) -> None:
        if runs is not None:
            check_count("runs", runs, 1, usual="None runs the head as often as pays")
        check_temperature(temperature)
        check_count("num_candidates", num_candidates, 1, 64, usual="10 is usual")
        check_count("source", source, 0, 3, usual="0 for the only source")
        self.head = head
        self.runs = runs
        self.temperature = temperature
        self.law_size = num_candidates
        self.source = source

    def attach(self, model: PreTrainedModel) -> None:
        self.head = attached(model, self.head)
        self.feature_layers = self.head.feature_layers
        self._rows: FollowedRows = FollowedRows(model, self.head, temperature=self.temperature, count=self.law_size)
        if self.runs is None:
            self._paying = PayingRuns(self.head.share_of_step(), most=MOST_RUNS)

    @torch.inference_mode()
    def laws(self, request: DraftRequest, plan: Planner) -> OutsideLaws | None:
        """See `LawSource.laws`; a row of one token has no feature yet and gets no law. Rows are held for a run that is
        to come, which none is where nothing is learned and the head has not paid."""
        if self._paying is not None and not request.is_learning and not self._paying.pays_for(request):
            self.skip()
            return None
        trees: LawTrees[torch.Tensor] = LawTrees(len(request.histories))

        def ask(run: int, planned: DraftBatch | None) -> OutsideLaws | None:
            return self._rooted(trees, request) if run == 0 else self._deepened(trees, request, planned)

        if self._paying is not None:
            self._rows.hold(request.histories)
            return self._paying.laws(request, plan, ask)
        return laws_of_runs(self.runs, plan, ask)

    def _rooted(self, trees: LawTrees[torch.Tensor], request: DraftRequest) -> OutsideLaws | None:
        """Run the head at the pending tokens; None where no row has a feature."""
        rows, laws = self._rows.catch_up(request.histories)
        return None if laws is None else self._added(trees, roots(rows.tolist(), request.histories), laws)

    def _deepened(
        self, trees: LawTrees[torch.Tensor], request: DraftRequest, planned: DraftBatch
    ) -> OutsideLaws | None:
        """Run the head on planned nodes that it has not seen; None where there is none."""
        places = trees.frontier(planned, request.max_depths)
        if not places:
            return None
        return self._added(trees, places, self._extend(trees, places))

    def _added(self, trees: LawTrees[torch.Tensor], places: list[Place], laws: NodeLaws) -> OutsideLaws:
        """All laws, with these."""
        trees.add(places, laws.estimates, laws.ids, laws.probs)
        return trees.laws(self.source)

    def _extend(self, trees: LawTrees[torch.Tensor], places: list[Place]) -> NodeLaws:
        """The head on planned nodes."""
        parents = [None if parent == ROOT else parent - 1 for _, parent, _ in places]  # the root is none of them
        tokens = [token for _, _, token in places]
        return self._rows.extend([row for row, _, _ in places], tokens, parents, trees.estimates_at(places))
