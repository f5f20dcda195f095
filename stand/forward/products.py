"""The matrix products of a forward over few tokens on a CPU: the fastest that torch ships, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch.nn import Linear
from torch.nn.functional import linear
from transformers import PreTrainedModel

EXCHANGED_TOKENS = 4  # most tokens for which the operands are exchanged
EXCHANGED_INPUTS = 1024  # most columns of such a weight
LEAST_ONEDNN = 1 << 19  # entries of a weight: its call takes 15 us more than torch's own


@contextmanager
def few_token_products(model: PreTrainedModel) -> Iterator[None]:
    """Within it the linear layers of a model on a CPU take `few_token_product` where their operands allow it.

    Only exact `torch.nn.Linear` whose forward nobody else has replaced; the model is given back as it was.
    """
    swapped = []
    if model.device.type == "cpu" and is_available() and not torch.is_autocast_enabled("cpu"):
        for layer in model.modules():
            if type(layer) is Linear and "forward" not in vars(layer):
                vars(layer)["forward"] = partial(_forward, layer)
                swapped.append(layer)
    try:
        yield
    finally:
        for layer in swapped:
            del layer.forward


def few_token_product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[..., N]: `torch.nn.functional.linear` of float32 states [..., K] and weight [N, K] on a CPU, up to rounding.

    torch's own product (MKL's) reads a weight at a third of the memory's speed for one token and takes twice as long
    for two. With the operands exchanged MKL is fast for up to four tokens, oneDNN nearly flat up to sixteen. Which one
    is taken follows from shapes alone, so that a step repeats itself exactly.
    """
    num_outputs, num_inputs = weight.shape
    num_tokens = states.numel() // num_inputs
    if num_tokens <= EXCHANGED_TOKENS and num_inputs <= EXCHANGED_INPUTS:
        return _exchanged(states, weight, bias)
    if num_outputs * num_inputs >= LEAST_ONEDNN:
        return _onednn(states, weight, bias)
    return linear(states, weight, bias)


@cache
def is_available() -> bool:
    """Whether this build of torch has both libraries, and oneDNN's product under the name that is known here."""
    return torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _forward(layer: Linear, states: torch.Tensor) -> torch.Tensor:
    is_plain = states.dtype == layer.weight.dtype == torch.float32 and layer.weight.is_contiguous()
    product = few_token_product if is_plain and states.device.type == "cpu" and states.numel() else linear
    return product(states, layer.weight, layer.bias)


def _onednn(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


def _exchanged(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product as weight @ states.T; an odd number of tokens is made even, for which MKL takes another way."""
    columns = states.reshape(-1, states.shape[-1])
    num_tokens = len(columns)
    if num_tokens % 2:
        columns = torch.cat([columns, columns[:1]])
    output = torch.mm(weight, columns.t())[:, :num_tokens].t().contiguous()
    if bias is not None:
        output += bias
    return output.reshape(*states.shape[:-1], -1)
