"""What every head is to those that draft with it: features of the target's tokens go in, estimates of the next come
out."""

from __future__ import annotations

from abc import abstractmethod

import torch

from stand.drafters.heads.trained_part import TrainedPart
from stand.forward.features import FeatureLayers
from stand.fusion.fusion import Fusion


class FeatureHead(TrainedPart):
    """Of EAGLE-1, EAGLE-3 or the target's own checkpoint."""

    feature_layers: FeatureLayers = ()  # see `Drafter.feature_layers`

    def combined(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features [..., D], from what the target gives of `feature_layers`: the same."""
        return hidden

    @abstractmethod
    def forward(
        self,
        features: torch.Tensor,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        cache: object = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Estimates [B, M, D] of the next features, from features [B, M, D] and the tokens after them [B, M] int64.

        position_ids [B, M]: of the features. cache and kwargs go to the layers.
        """

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """[..., V]: the target's LM head."""
        return self._model[0].get_output_embeddings()(features)

    def fusion(self) -> Fusion | None:
        """What was proven for its layers on a CPU; None: nothing, as they are not the target's."""
        return None
