"""A mixture's experts written plainly in float64, and random weights for them."""

from typing import NamedTuple

import torch
from torch.nn.functional import gelu, silu

from stand.fusion.experts import ExpertForm
from stand.fusion.formulas import CLAMPED, GELU_ERF, GELU_TANH, RELU_SQUARED, SILU

ACTIVATIONS = {SILU: silu, GELU_TANH: lambda x: gelu(x, approximate="tanh"), GELU_ERF: gelu}


class Mixture(NamedTuple):
    """Arguments of `mixed_experts` before the form."""

    states: torch.Tensor
    experts: torch.Tensor
    shares: torch.Tensor
    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


def random_mixture(
    form: ExpertForm,
    *,
    tokens: int,
    per_token: int = 2,
    num_experts: int = 6,
    width: int = 32,
    size: int = 16,
    has_bias: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Mixture:
    """Normal numbers of a size that keeps results near one; experts drawn without replacement."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    outputs = size if form.activation == RELU_SQUARED else 2 * size
    up, down = (
        normal(num_experts, outputs, width, scale=width**-0.5),
        normal(num_experts, width, size, scale=size**-0.5),
    )
    if form.is_transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    biases = (normal(num_experts, outputs), normal(num_experts, width)) if has_bias else (None, None)
    experts = torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)[:, :per_token].contiguous()
    shares = torch.rand(tokens, per_token, generator=generator).to(dtype)
    return Mixture(normal(tokens, width), experts, shares, up, biases[0], down, biases[1])


def plain_experts(mixture: Mixture, form: ExpertForm) -> torch.Tensor:
    """[M, H] float64, token by token and expert by expert."""
    states, experts, shares, up, up_bias, down, down_bias = (
        part.double() if part is not None and part.is_floating_point() else part for part in mixture
    )
    if form.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    results = torch.zeros_like(states)
    for token, (own, weights) in enumerate(zip(experts.tolist(), shares, strict=True)):
        for expert, share in zip(own, weights, strict=True):
            inner = up[expert] @ states[token] + (0 if up_bias is None else up_bias[expert])
            outer = down[expert] @ _activated(inner, form) + (0 if down_bias is None else down_bias[expert])
            results[token] += share * outer
    return results


def _activated(inner: torch.Tensor, form: ExpertForm) -> torch.Tensor:
    if form.activation == RELU_SQUARED:
        return inner.relu().square()
    gate, up = (inner[::2], inner[1::2]) if form.is_interleaved else inner.chunk(2)
    if form.activation == CLAMPED:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        return (up + 1) * gate * torch.sigmoid(form.alpha * gate)
    return ACTIVATIONS[form.activation](gate) * up
