"""What the target computed of some generations, for heads that read the inputs of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from stand.forward.features import FeatureLayers
from training.generations import Generation
from training.head_training import padded_tokens


class LayerHead(Protocol):
    feature_layers: FeatureLayers


@dataclass(frozen=True, slots=True)
class LayerBatch:
    """What goes in, what should come out, and where it counts."""

    hidden: torch.Tensor  # [B, L, W]: inputs of the target's layers that the head reads
    last: torch.Tensor  # [B, L, D]: what the target's LM head reads
    token_ids: torch.Tensor  # [B, L]
    counts: torch.Tensor  # [B, L] bool: this token's law wrote a token of the generation

    @property
    def nbytes(self) -> int:
        return self.hidden.nbytes + self.last.nbytes


@torch.no_grad()
def layer_batch(head: LayerHead, target: PreTrainedModel, generations: list[Generation]) -> LayerBatch:
    """Padding is on the right, so causality hides it."""
    token_ids = padded_tokens(generations).to(target.device)
    counts = torch.zeros(token_ids.shape, dtype=torch.bool, device=target.device)
    for row, one in enumerate(generations):
        counts[row, max(one.prompt_length - 1, 0) : len(one.token_ids) - 1] = True
    found = target.base_model(input_ids=token_ids, use_cache=False, output_hidden_states=True)
    hidden = torch.cat([found.hidden_states[layer] for layer in head.feature_layers], dim=-1)
    return LayerBatch(hidden, found.last_hidden_state, token_ids, counts)
