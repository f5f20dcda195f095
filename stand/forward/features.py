"""A model's last hidden states, taken from its own forwards: what learned drafters ask for (`requires_features`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from stand.forward.cache.tree_cache import TreeCache
from stand.forward.devices import input_device
from stand.forward.model import prefill, text_config


@contextmanager
def taken_features(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Within the block every packed forward appends [M, D]: the last hidden states, after the final norm, as the LM
    head takes them (of all tokens, also where logits of few are kept)."""
    taken: list[torch.Tensor] = []
    place = input_device(model)  # the last layers of a model may lie elsewhere
    hook = _decoder(model).register_forward_hook(lambda module, args, output: taken.append(output[0][0].to(place)))
    try:
        yield taken
    finally:
        hook.remove()


def _decoder(model: PreTrainedModel) -> nn.Module:
    """Whose output is the last hidden states. OPT's head asks the decoder within its base model; what ModernBERT calls
    its decoder is its head, and Mllama's text model calls itself so, head and all."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if not any(decoder is part for part in model.base_model.modules()):
        decoder = model.base_model
    if all(head is not part for part in decoder.modules()):
        return decoder
    inner = (part for part in decoder.modules() if isinstance(part, PreTrainedModel))
    return next((part for part in inner if all(head is not one for one in part.modules())), decoder)


def prefill_features(model: PreTrainedModel, cache: TreeCache, token_ids: np.ndarray, *, row: int) -> torch.Tensor:
    """`prefill`, and the features [L, D] of `token_ids`, int32 [L]."""
    with taken_features(model) as taken:
        prefill(model, cache, token_ids, row=row, takes_features=True)
    return torch.cat(taken) if taken else no_features(model)


def no_features(model: PreTrainedModel) -> torch.Tensor:
    """[0, D]."""
    return torch.empty(0, text_config(model).hidden_size, dtype=model.dtype, device=input_device(model))
