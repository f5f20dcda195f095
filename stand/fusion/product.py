"""The linear layers inside fused modules: few tokens on a CPU go straight to the compiled product."""

from __future__ import annotations

import torch
from torch import nn

from stand.forward.dot_products import multiply
from stand.forward.few_token_product import WIDEST, parallel_region
from stand.forward.linear_layers import IS_FASTER, MOST_TOKENS
from stand.fusion.merged_linear import is_bare


def direct_layers(module: nn.Module) -> frozenset[nn.Module]:
    """The children that compute no more than a product: what `direct_product` may stand for."""
    return frozenset(child for child in module.children() if type(child) is nn.Linear and is_bare(child))


def direct_product(layer: nn.Linear, states: torch.Tensor) -> torch.Tensor:
    """`layer(states)` for states [..., K], in half the time that a module's call and all checks take with few numbers.

    What the compiled product does not serve (other dtypes, many tokens, gradients), the layer itself computes.
    """
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    if not _is_served(states, weight, bias):
        return layer(states)
    num_rows, depth = weight.shape
    results = torch.empty((*states.shape[:-1], num_rows))
    multiply(
        states.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), results.data_ptr(),
        states.numel() // depth, num_rows, depth, WIDEST, torch.get_num_threads(), parallel_region(),
    )  # fmt: skip
    return results


def _is_served(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    depth = weight.shape[1]
    if not IS_FASTER or not 0 < states.numel() <= MOST_TOKENS * depth or states.shape[-1] != depth:
        return False
    for tensor in (states, weight) if bias is None else (states, weight, bias):
        if not (tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()):
            return False
    return not torch.is_grad_enabled()
