"""A model's linear layers in the forwards of an engine on a CPU: few tokens take this project's own product."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn import Linear
from torch.nn.functional import linear
from transformers import PreTrainedModel

from stand.forward.few_token_product import IS_FASTER, FewTokenProduct, are_weights, is_plain

MOST_TOKENS = 64  # of a product of our own: beyond, torch's is as fast


@contextmanager
def few_token_layers(model: PreTrainedModel) -> Iterator[None]:
    """Within it the linear layers of a model on a CPU take `FewTokenProduct` for up to MOST_TOKENS tokens.

    Only exact `torch.nn.Linear` with plain float32 weights whose forward nobody else has replaced; others compute as
    before, and all of them on a processor without AVX2, or where gradients are kept. Weights that are replaced within
    it count from the next time on. The model is given back as it was.
    """
    products = _products(model) if IS_FASTER and model.device.type == "cpu" else {}
    for layer, product in products.items():
        vars(layer)["forward"] = partial(_forward, layer, product)
    try:
        yield
    finally:
        for layer in products:
            del layer.forward


@torch.no_grad()
def _products(model: PreTrainedModel) -> dict[Linear, FewTokenProduct]:
    return {
        layer: FewTokenProduct(layer.weight, layer.bias)
        for layer in model.modules()
        if type(layer) is Linear and "forward" not in vars(layer) and are_weights(layer.weight, layer.bias)
    }


def _forward(layer: Linear, product: FewTokenProduct, states: torch.Tensor) -> torch.Tensor:
    is_few = 0 < states.numel() <= MOST_TOKENS * layer.in_features and states.shape[-1] == layer.in_features
    if is_few and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and is_plain(states):
        return product(states)
    return linear(states, layer.weight, layer.bias)
