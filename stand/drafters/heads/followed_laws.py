"""What sources of laws have in common whose head follows the target's rows."""

from __future__ import annotations

import numpy as np
import torch

from stand.drafters.drafter import DraftRequest, Lesson
from stand.drafters.heads.followed_features import FollowedFeatures
from stand.drafters.heads.packed_run import RunRecorder
from stand.drafters.law_source import LawSource
from stand.drafters.paying_runs import PayingRuns


class FollowedLaws(LawSource):
    """Tells the rows what has come, and how long steps take where the head runs only as often as it pays."""

    requires_features = True
    _rows: FollowedFeatures | None = None  # from `attach` on
    _paying: PayingRuns | None = None  # where the head runs only as often as it pays

    def record_runs(self, recorder: RunRecorder | None) -> None:
        self._rows.record_runs(recorder)

    def skip(self) -> None:
        """See `LawSource.skip`: prompts do not wait for a later draft, when their rows will have gone on."""
        self._rows.forget_prompts()

    def record_time(self, request: DraftRequest, num_tokens: int, seconds: float) -> None:
        if self._paying is not None and request.is_learning:
            self._paying.record_step(seconds)

    def follow_prompt(self, token_ids: np.ndarray, features: torch.Tensor) -> None:
        self._rows.follow_prompt(token_ids, features)

    def follow(self, lesson: Lesson) -> None:
        self._rows.follow(lesson)
