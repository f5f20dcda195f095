"""Streams as a source of laws: the default drafter blends what they say with what the lookup has seen."""

from __future__ import annotations

from os import PathLike

import numpy as np
from transformers import PreTrainedModel

from stand.drafters.drafter import DraftRequest
from stand.drafters.law_source import LawSource, Plan
from stand.drafters.streams.rider import StreamRider
from stand.drafters.streams.weights import Streams
from stand.trees import OutsideLaws


class StreamLaws(LawSource):
    """Laws of streams (arXiv 2402.11131) for `BlendedDrafter(source=...)`.

    streams, temperature, num_candidates, placement: as in `StreamingDrafter`; what is wrong with a law is learned.
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
        source: int = 0,
    ) -> None:
        self.source = source
        self.rider = StreamRider(
            streams, placement=placement, temperature=temperature, num_candidates=num_candidates
        )  # fmt: skip

    def attach(self, model: PreTrainedModel) -> None:
        self.rider.attach(model)

    def laws(self, request: DraftRequest, plan: Plan) -> OutsideLaws | None:
        """See `LawSource.laws`; a row that has made no step yet gets no law."""
        found = [self.rider.laws_of(history) for history in request.histories]
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
