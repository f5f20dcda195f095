"""What a trained head is to the default drafter: laws from outside of the lookup, blended into one draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.drafters.drafter import CallCounter, DraftRequest, Lesson
from stand.drafters.heads.packed_run import RunRecorder
from stand.forward.features import FeatureLayers
from stand.forward.rider import Rider
from stand.trees import DraftBatch, OutsideLaws

Planner = Callable[[OutsideLaws | None], DraftBatch]


class LawSource(CallCounter, ABC):
    """Says what comes next in each row; `BlendedDrafter(source=...)` weighs it and drafts. Only `laws` must be written.

    It may be as wrong as it likes: the drafter learns what its laws are worth, and what it draws children from is what
    it records. But laws must be made before the draft and must not depend on its noise: they follow from the row's own
    text, from what the source was shown, and from planned drafts.
    """

    requires_features: bool = False  # whether `follow_prompt` and `follow` want the target's hidden states
    feature_layers: FeatureLayers = ()  # see `Drafter.feature_layers`; known when it is attached
    rider: Rider | None = None  # see `Drafter.rider`

    def attach(self, model: PreTrainedModel) -> None:
        """`stand.wrap` shows the model. Raises ValueError where it does not fit."""

    def record_runs(self, recorder: RunRecorder | None) -> None:
        """See `Drafter.record_runs`."""

    @abstractmethod
    def laws(self, request: DraftRequest, plan: Planner) -> OutsideLaws | None:
        """The laws for one step's drafts: B rows, any nodes; None where there is none.

        plan: of laws that are known so far, the draft that would be grown if children were not drawn but the likeliest
        tokens. It has no noise in it, and so may say at which nodes more laws are worth their time.
        """

    def skip(self) -> None:
        """Nothing is drafted in the coming step, so no laws are asked for; the next one is likely alike."""

    def start_call(self, *, learns: bool) -> int:
        """See `Drafter.start_call`: what a source has learned outlives the drafter that it was given to."""
        return self.count_call(learns=learns)

    def record_time(self, request: DraftRequest, num_tokens: int, seconds: float) -> None:
        """See `Drafter.record_time`."""

    def follow_prompt(self, token_ids: np.ndarray, features: torch.Tensor) -> None:
        """See `Drafter.follow_prompt`."""

    def follow(self, lesson: Lesson) -> None:
        """See `Drafter.follow`."""

    def learn_prompt(self, token_ids: np.ndarray) -> None:
        """See `Drafter.learn_prompt`; `follow_prompt` comes later, when a row of the prompt enters."""

    def learn(self, lesson: Lesson) -> None:
        """See `Drafter.learn`; the lookup has learned the lesson already."""
