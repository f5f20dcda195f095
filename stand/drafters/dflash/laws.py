"""DFlash as a source of laws: the default drafter blends what a head says of a block with what the lookup has seen."""

from __future__ import annotations

from os import PathLike

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.argument_checks import check_flags
from stand.drafters.dflash.followed_blocks import FollowedBlocks
from stand.drafters.dflash.head import BlockLaws, DFlashHead
from stand.drafters.drafter import DraftRequest
from stand.drafters.heads.followed_laws import FollowedLaws
from stand.drafters.law_source import Planner
from stand.drafters.paying_runs import PayingRuns
from stand.drafters.settings import check_count, check_temperature
from stand.trees import NO_PARENT, NO_TOKEN, DraftBatch, OutsideLaws

MOST_BEFORE = 8  # tokens before a place that have laws of their own there, where a head scores pairs


class DFlashLaws(FollowedLaws):
    """Laws of a head that guesses a block in one run, for `BlendedDrafter(source=...)`: DFlash (arXiv 2602.06036),
    DFlash 2 or DSpark.

    head: a `DFlashHead` of the target, or the file or folder of a checkpoint, read when the engine is made.
    always: run in every step. Else where the last runs paid (`PayingRuns`), by measured time, or in calls with a seed
    by what a run reads and does.
    temperature, num_candidates: a law is the head's at `temperature`, its `num_candidates` best tokens. `temperature`
    is best the target's own, 1 under greedy decoding; what is wrong with it is learned.
    source: 0..3; a lookup learns apart what each source is worth.

    Where a head scores pairs, a place has a law for each of the likeliest tokens before it, and one for all others.
    One object serves one engine at a time. Raises ValueError for settings out of range.
    """

    def __init__(
        self,
        head: DFlashHead | str | PathLike,
        *,
        always: bool = False,
        temperature: float = 1.0,
        num_candidates: int = 10,
        source: int = 0,
    ) -> None:
        check_flags(always=always)
        check_temperature(temperature)
        check_count("num_candidates", num_candidates, 1, 64, usual="10 is usual")
        check_count("source", source, 0, 3, usual="0 for the only source")
        self.head = head
        self.always = always
        self.temperature = temperature
        self.law_size = num_candidates
        self.source = source

    def attach(self, model: PreTrainedModel) -> None:
        self.head = DFlashHead.of(model, self.head)
        self.feature_layers = self.head.feature_layers
        asked = {"temperature": self.temperature, "count": self.law_size, "width": MOST_BEFORE}
        self._rows: FollowedBlocks = FollowedBlocks(model, self.head, **asked)
        if not self.always:
            self._paying = PayingRuns(self.head.share_of_step(), most=1)

    @torch.inference_mode()
    def laws(self, request: DraftRequest, plan: Planner) -> OutsideLaws | None:
        """See `LawSource.laws`. Rows are held for a run that is to come, which none is where nothing is learned and the
        head has not paid."""
        if self._paying is None:
            return self._run(request)
        if not request.is_learning and not self._paying.pays_for(request):
            self.skip()
            return None

        def ask(run: int, planned: DraftBatch | None) -> OutsideLaws:
            return self._run(request)

        self._rows.hold(request.histories)
        return self._paying.laws(request, plan, ask)

    def _run(self, request: DraftRequest) -> OutsideLaws:
        found = self._rows.run(request.histories)
        return _alone(found, self.source) if found.before is None else _in_levels(found, self.source)


def _alone(found: BlockLaws, source: int) -> OutsideLaws:
    """One law per place."""
    return OutsideLaws.of_heads(found.ids.numpy(), found.probs.numpy(), source=source)


def _in_levels(found: BlockLaws, source: int) -> OutsideLaws:
    """Per place one law for each token before it that has one, and one for all others.

    A level is the node of any token, whose children are the next level, and behind it the nodes of the tokens, which
    have none and go on as it does (`OutsideLaws`).
    """
    num_rows, num_places, size = found.ids.shape
    width, law_size = found.before.shape[2] + 1, found.pair_ids.shape[3]
    ids = torch.cat([_cut(found.ids[:, :, None], law_size, NO_TOKEN), found.pair_ids], dim=2)  # [A, G, width, K]
    probs = torch.cat([_cut(found.probs[:, :, None], law_size, 0), found.pair_probs], dim=2)
    tokens = torch.nn.functional.pad(found.before, (1, 0), value=OutsideLaws.ANY_TOKEN)  # [A, G, width]
    ids, probs, tokens = (_nodes(part.flatten(1, 2), width) for part in (ids, probs, tokens))
    above = np.maximum(1 + width * (np.arange(num_places - 1) - 1), 0)  # of each level behind the root's
    parents = np.concatenate([[NO_PARENT], np.repeat(above, width)])
    num_nodes = len(parents)
    return OutsideLaws(
        (num_nodes * np.arange(num_rows + 1)).astype(np.int32), np.tile(parents.astype(np.int32), num_rows),
        tokens, ids, probs, source=source,
    )  # fmt: skip


def _nodes(levels: torch.Tensor, width: int) -> np.ndarray:
    """[A * n, ...] of [A, G * width, ...]: of the first level the second node alone, that of the pending token."""
    return torch.cat([levels[:, 1:2], levels[:, width:]], dim=1).flatten(0, 1).numpy()


def _cut(laws: torch.Tensor, size: int, nothing: int) -> torch.Tensor:
    """[..., size], padded with `nothing`."""
    cut = laws[..., :size]
    return torch.nn.functional.pad(cut, (0, size - cut.shape[-1]), value=nothing)
