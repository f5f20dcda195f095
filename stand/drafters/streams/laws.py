"""Streams as a source of laws: the default drafter blends what they say with what the lookup has seen."""

from __future__ import annotations

from os import PathLike

import numpy as np
from transformers import PreTrainedModel

from stand.argument_checks import check_flags
from stand.drafters.drafter import DraftRequest
from stand.drafters.law_source import LawSource, Planner
from stand.drafters.paying_runs import PayingRuns, expected_tokens
from stand.drafters.settings import check_count
from stand.drafters.streams.rider import StreamRider
from stand.drafters.streams.weights import Streams
from stand.trees import OutsideLaws


class StreamLaws(LawSource):
    """Laws of streams (arXiv 2402.11131) for `BlendedDrafter(source=...)`.

    streams, temperature, num_candidates, placement: as in `StreamingDrafter`; what is wrong with a law is learned.
    always: run at the end of every step. Else where the last runs paid (`PayingRuns`), by measured time, or in calls
    with a seed by what a run reads and does; at every node (`placement="nodes"`) always.
    source: 0..3; a lookup learns apart what each source is worth.

    One object serves one engine at a time. Raises ValueError for settings out of range.
    """

    def __init__(
        self,
        streams: Streams | str | PathLike,
        *,
        temperature: float = 1.0,
        num_candidates: int = 10,
        placement: str = "end",
        always: bool = False,
        source: int = 0,
    ) -> None:
        check_count("source", source, 0, 3, usual="0 for the only source")
        check_flags(always=always)
        self.rider = StreamRider(
            streams, placement=placement, temperature=temperature, num_candidates=num_candidates
        )  # fmt: skip
        self.source = source
        self.always = always or placement == "nodes"
        self._paying: PayingRuns | None = None  # where streams do not always run

    def attach(self, model: PreTrainedModel) -> None:
        self.rider.attach(model)
        if not self.always:
            self._paying = PayingRuns(self.rider.streams.share_of_step(), most=1)

    def record_time(self, request: DraftRequest, num_tokens: int, seconds: float) -> None:
        if self._paying is not None and request.is_learning:
            self._paying.record_step(seconds)

    def laws(self, request: DraftRequest, plan: Planner) -> OutsideLaws | None:
        """See `LawSource.laws`; a row that has made no step yet gets no law, nor does one whose last step was not
        followed by a run."""
        laws, paying = self._known_laws(request), self._paying
        if paying is None:
            self.rider.is_idle = False  # also after steps without drafts
            return laws
        if laws is not None and request.is_learning:
            paying.record_run(0, self.rider.last_seconds)
            paying.record_gain(0, expected_tokens(plan(None)), expected_tokens(plan(laws)))
        self.rider.is_idle = not paying.pays_for(request)
        if request.is_learning:
            paying.end_step(0 if self.rider.is_idle else 1)
        return laws

    def skip(self) -> None:
        self.rider.is_idle = True

    def _known_laws(self, request: DraftRequest) -> OutsideLaws | None:
        found = self.rider.laws_of(request)
        known = [law for law in found if law is not None]
        if not known:
            return None
        gamma = self.rider.streams.num_streams
        return OutsideLaws(
            np.concatenate([[0], np.cumsum([0 if law is None else gamma for law in found])]).astype(np.int32),
            np.tile(np.arange(-1, gamma - 1, dtype=np.int32), len(known)),
            np.full(len(known) * gamma, OutsideLaws.ANY_TOKEN, dtype=np.int32),
            np.concatenate([ids for ids, _ in known]),
            np.concatenate([probs for _, probs in known]),
            source=self.source,
        )
