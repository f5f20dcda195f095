"""A model's linear layers in the forwards of an engine on a CPU: few tokens take this project's own product."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn import Linear
from torch.nn.functional import linear
from transformers import PreTrainedModel

from stand.forward.few_token_product import IS_FASTER, few_token_product, is_supported

MOST_TOKENS = 64  # of a product of our own: beyond, torch's is as fast


@contextmanager
def few_token_layers(model: PreTrainedModel) -> Iterator[None]:
    """Within it the linear layers of a model on a CPU take `few_token_product` for up to MOST_TOKENS tokens.

    Only exact `torch.nn.Linear` whose forward nobody else has replaced, and only contiguous float32 operands; others
    compute as before, and all of them on a processor without AVX2. The model is given back as it was.
    """
    swapped = []
    if IS_FASTER and model.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
        for layer in model.modules():
            if type(layer) is Linear and "forward" not in vars(layer):
                vars(layer)["forward"] = partial(_forward, layer)
                swapped.append(layer)
    try:
        yield
    finally:
        for layer in swapped:
            del layer.forward


def _forward(layer: Linear, states: torch.Tensor) -> torch.Tensor:
    is_few = 0 < states.numel() <= MOST_TOKENS * layer.in_features
    product = few_token_product if is_few and is_supported(states, layer.weight, layer.bias) else linear
    return product(states, layer.weight, layer.bias)
