"""DFlash as a drafter: chains or trees of tokens drawn from the recorded laws of one run of a head."""

from __future__ import annotations

from os import PathLike

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.argument_checks import check_flags
from stand.drafters.blended import MOST_NODES, default_budget
from stand.drafters.dflash.followed_blocks import FollowedBlocks
from stand.drafters.dflash.head import DFlashHead
from stand.drafters.drafter import Drafter, DraftRequest, Lesson
from stand.drafters.growing_draft import GrowingDraft, grow_best_first, planted, typical_tree
from stand.drafters.heads.packed_run import RunRecorder
from stand.drafters.settings import check_count, check_temperature
from stand.trees import ROOT, DraftBatch


class DFlashDrafter(Drafter):
    """Drafts by a head that guesses a block in one run: DFlash (arXiv 2602.06036), DFlash 2 or DSpark.

    head: a `DFlashHead` of the target, or the file or folder of a checkpoint, read when the engine is made.
    budget: the most nodes of all rows of a step together, the most likely first; None: `default_budget` of the model.
    is_chain: one child per node, as published. Else trees, of the same one run.
    temperature, num_candidates: a law is the head's at `temperature` over its `num_candidates` best tokens,
    renormalised before the draw: what is recorded is what was drawn from. `temperature` is best the target's own; under
    greedy decoding the best tokens are drafted as they are.

    Nothing is learned while it drafts: drafts are a function of the rows' texts and random numbers. One drafter serves
    one engine at a time. To draft with the lookup as well, take `BlendedDrafter(source=DFlashLaws(head))`.

    Raises ValueError for settings out of range.
    """

    remembers = False
    requires_features = True

    def __init__(
        self,
        head: DFlashHead | str | PathLike,
        *,
        budget: int | None = None,
        is_chain: bool = False,
        temperature: float = 1.0,
        num_candidates: int = 16,
    ) -> None:
        if budget is not None:
            check_count("budget", budget, 0, MOST_NODES, usual="32 to 128 nodes are usual")
        check_flags(is_chain=is_chain)
        check_temperature(temperature)
        check_count("num_candidates", num_candidates, 1, usual="16 is usual")
        self.head = head
        self.budget = budget
        self.is_chain = is_chain
        self.temperature = temperature
        self.law_size = num_candidates
        self._default_budget: int | None = None  # of the model
        self._rows: FollowedBlocks | None = None

    def attach(self, model: PreTrainedModel, fingerprint: bytes) -> None:
        self.head = DFlashHead.of(model, self.head)
        self.feature_layers = self.head.feature_layers
        self._default_budget = default_budget(model)
        asked = {"temperature": self.temperature, "count": self.law_size, "width": self.law_size}
        self._rows = FollowedBlocks(model, self.head, **asked)

    def record_runs(self, recorder: RunRecorder | None) -> None:
        self._rows.record_runs(recorder)

    def typical_draft(self) -> DraftBatch:
        width = min(self.law_size, self.head.num_guessed)
        return DraftBatch.concatenate([typical_tree(width, is_chain=self.is_chain)])

    def follow_prompt(self, token_ids: np.ndarray, features: torch.Tensor) -> None:
        self._rows.follow_prompt(token_ids, features)

    def follow(self, lesson: Lesson) -> None:
        self._rows.follow(lesson)

    def most_nodes(self, num_rows: int) -> int:
        return self._default_budget if self.budget is None else self.budget

    @torch.inference_mode()
    def draft(self, request: DraftRequest) -> DraftBatch:
        """One tree per row; see `Drafter.draft`."""
        budget = self.most_nodes(len(request.histories))
        drafts = planted(request, budget + 1)
        if budget:
            laws = [_RowLaws(*row) for row in self._blocks(request)]
            most = 1 if self.is_chain else None
            grow_best_first(drafts, lambda row, node: laws[row].at(drafts[row], node), budget, most_children=most)
        return DraftBatch.concatenate([draft.tree() for draft in drafts])

    def _blocks(self, request: DraftRequest) -> list[tuple[np.ndarray, ...]]:
        """Per row, the arrays of `BlockLaws` that there are."""
        found = self._rows.run(request.histories)
        parts = (found.ids, found.probs, found.before, found.pair_ids, found.pair_probs)
        return list(zip(*(part.numpy() for part in parts if part is not None), strict=True))


class _RowLaws:
    """Of one row's block."""

    def __init__(
        self,
        ids: np.ndarray,
        probs: np.ndarray,
        before: np.ndarray | None = None,
        pair_ids: np.ndarray | None = None,
        pair_probs: np.ndarray | None = None,
    ) -> None:
        self._alone, self._before, self._paired = (ids, probs), before, (pair_ids, pair_probs)

    def at(self, draft: GrowingDraft, node: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Tokens and law of what follows a node; None behind the block."""
        place = draft.depths[node]
        if place >= len(self._alone[0]):
            return None
        if self._before is not None:
            known = [0] if node == ROOT else np.flatnonzero(self._before[place] == draft.token_ids[node])
            if len(known):
                return tuple(part[place, known[0]] for part in self._paired)
        return tuple(part[place] for part in self._alone)
