"""A mixture's experts written plainly in float64, and random weights for them."""

from typing import NamedTuple

import torch
from torch.nn.functional import gelu, silu

from stand.fusion.formulas import CLAMPED, GELU_ERF, GELU_TANH, RELU_SQUARED, SILU
from stand.fusion.forwards.experts import ExpertForm

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


def plain_experts(
    states, experts, shares, up, up_bias, down, down_bias, activation, is_transposed, is_interleaved, alpha, limit
) -> torch.Tensor:
    """[M, H] float64: a loop over tokens and their experts, rounded where transformers rounds."""
    dtype, promoted = states.dtype, torch.promote_types(states.dtype, shares.dtype)
    form = ExpertForm(activation, is_transposed, is_interleaved, alpha, limit)

    def product(weight, bias, expert, row):
        matrix = weight[expert].double().T if is_transposed else weight[expert].double()
        result = _rounded(matrix @ row, dtype)
        return result if bias is None else _rounded(result + bias[expert].double(), dtype)

    output = torch.zeros(states.shape, dtype=torch.float64)
    for token, row in enumerate(states.double()):
        for expert, share in zip(experts[token].tolist(), shares[token].double(), strict=True):
            active = _gated(product(up, up_bias, expert, row), form, dtype)
            output[token] += _rounded(product(down, down_bias, expert, active) * share, promoted)
    return output


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).double()


def _gated(inner: torch.Tensor, form: ExpertForm, dtype: torch.dtype) -> torch.Tensor:
    """Of one row, with each operation's rounding."""
    if form.activation == RELU_SQUARED:
        return _rounded(inner.relu() ** 2, dtype)
    gate, up = (inner[0::2], inner[1::2]) if form.is_interleaved else inner.chunk(2)
    if form.activation != CLAMPED:
        return _rounded(_rounded(ACTIVATIONS[form.activation](gate), dtype) * up, dtype)
    gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    opened = _rounded(gate * _rounded(torch.sigmoid(_rounded(gate * form.alpha, dtype)), dtype), dtype)
    return _rounded(_rounded(up + 1, dtype) * opened, dtype)
