"""A model's hidden states, taken from its own forwards: what learned drafters ask for (`requires_features`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from stand.forward.cache.tree_cache import TreeCache
from stand.forward.devices import input_device
from stand.forward.model import prefill, text_config

# The decoder layers whose inputs, side by side, are a token's feature; none: it is the last hidden state.
FeatureLayers = tuple[int, ...]


@contextmanager
def taken_features(model: PreTrainedModel, layers: FeatureLayers | None = ()) -> Iterator[list[torch.Tensor]]:
    """Within the block every packed forward appends the features [M, W] of all its tokens, also where logits of few are
    kept; where nobody asks for any (None), nothing.

    The last hidden states are those after the final norm, as the LM head takes them.
    """
    taken: list[torch.Tensor] = []
    hooks = [] if layers is None else _hooks(model, layers, taken)
    try:
        yield taken
    finally:
        for hook in hooks:
            hook.remove()


def _hooks(model: PreTrainedModel, layers: FeatureLayers, taken: list[torch.Tensor]) -> list[RemovableHandle]:
    place = input_device(model)  # the last layers of a model may lie elsewhere
    seen: dict[int, torch.Tensor] = {}  # inputs of layers

    def noting(layer: int) -> Callable[[nn.Module, tuple, dict], None]:
        def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
            seen[layer] = (args[0] if args else kwargs["hidden_states"])[0].to(place)

        return note

    def take(module: nn.Module, args: tuple, output: tuple) -> None:
        taken.append(torch.cat([seen[layer] for layer in layers], dim=-1) if layers else output[0][0].to(place))

    own = model.get_decoder().layers if layers else []
    hooks = [own[layer].register_forward_pre_hook(noting(layer), with_kwargs=True) for layer in set(layers)]
    return [*hooks, _decoder(model).register_forward_hook(take)]


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


def prefill_features(
    model: PreTrainedModel, cache: TreeCache, token_ids: np.ndarray, *, row: int, layers: FeatureLayers = ()
) -> torch.Tensor:
    """`prefill`, and the features [L, W] of `token_ids`, int32 [L]."""
    with taken_features(model, layers) as taken:
        prefill(model, cache, token_ids, row=row, takes_features=True)
    return torch.cat(taken) if taken else no_features(model, layers)


def no_features(model: PreTrainedModel, layers: FeatureLayers = ()) -> torch.Tensor:
    """[0, W]."""
    return torch.empty(0, feature_width(model, layers), dtype=model.dtype, device=input_device(model))


def feature_width(model: PreTrainedModel, layers: FeatureLayers) -> int:
    """W: numbers of a token's feature."""
    return text_config(model).hidden_size * max(len(layers), 1)
