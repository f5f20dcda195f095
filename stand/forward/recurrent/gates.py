"""How far a token makes a layer's state decay and how much it writes, from what the layer's products give: the formulas
of the model families, with the roundings of transformers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import softplus


@dataclass(frozen=True, slots=True, eq=False)
class DeltaGates:
    """Of the gated delta rule in Qwen3-Next, Qwen3.5 and OLMo Hybrid, for M tokens and H heads (arXiv 2412.06464,
    section 4)."""

    decay: torch.Tensor  # [M, H], adjacent heads: a
    rate: torch.Tensor  # [M, H], adjacent heads: b
    log_scale: torch.Tensor  # [H]: A_log
    bias: torch.Tensor  # [H]: dt_bias
    rate_scale: float  # 2 where updates may be negative (OLMo Hybrid), else 1

    def log_decay(self) -> torch.Tensor:
        """[M, H] float32: g = -exp(A_log) softplus(a + dt_bias)."""
        return -self.log_scale.float().exp() * softplus(self.decay.float() + self.bias.float())

    def beta(self) -> torch.Tensor:
        """[M, H] in the type of b."""
        return self.rate.sigmoid() * self.rate_scale


@dataclass(frozen=True, slots=True, eq=False)
class ComputedGates:
    """What such a layer's own forward has computed: g and beta [M, H]."""

    log_decays: torch.Tensor
    rates: torch.Tensor

    def log_decay(self) -> torch.Tensor:
        return self.log_decays

    def beta(self) -> torch.Tensor:
        return self.rates


@dataclass(frozen=True, slots=True, eq=False)
class StepSizes:
    """Of Mamba-2, for M tokens and H heads (arXiv 2405.21060, section 7.1; limits as in its code)."""

    raw: torch.Tensor  # [M, H]: dt
    bias: torch.Tensor | None  # [H]: dt_bias
    is_softplus: bool
    limits: tuple[float, float]
    decay: torch.Tensor  # [H]: A, negative

    def values(self) -> torch.Tensor:
        """[M, H] float32; a token writes this much of its values, and its log decay is A times this."""
        steps = self.raw if self.bias is None else self.raw + self.bias.to(self.raw.dtype)
        return torch.clamp(softplus(steps) if self.is_softplus else steps, *self.limits).float()
