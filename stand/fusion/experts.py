"""The forward of a mixture's experts: their weights are read once, however many tokens come to them.

For any class under transformers' `use_experts_implementation`, whose weights and settings have the same names. Which
experts a token goes to, and with what share, the model's own router says.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from torch import nn

from stand.fusion.formulas import CLAMPED, RELU_SQUARED
from stand.fusion.kernels import Kernels
from stand.fusion.mlp import find_activation, is_like

MOST_TOKENS = 512  # that the kernels take
MOST_TOKENS_OF_AN_EXPERT = 64  # on average: with more, the module's own products are as fast


class ExpertForm(NamedTuple):
    """How an expert computes, as `stand.gpu.kernels.experts.mixed_experts` takes it."""

    activation: int  # one of `formulas`
    is_transposed: bool  # whether outputs are columns of the weights
    is_interleaved: bool  # whether gates are every other output, and not the first half
    alpha: float = 0.0  # of CLAMPED
    limit: float = 0.0


class FusedExperts:
    """Stands for `module.forward`; `form` was found by trial."""

    def __init__(self, module: nn.Module, form: ExpertForm, kernels: Kernels):
        self.module = module
        self.form = form
        self.kernels = kernels
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """hidden_states [M, H], experts [M, k] and shares [M, k], by whatever names -> [M, H]."""
        arguments = dict(zip(self._names, given, strict=False)) | named
        states, experts, shares = (arguments[name] for name in self._names)
        module = self.module
        if len(states) > MOST_TOKENS or experts.numel() > MOST_TOKENS_OF_AN_EXPERT * module.num_experts:
            return type(module).forward(module, states, experts, shares)
        up = "gate_up_proj" if module.has_gate else "up_proj"
        up_bias, down_bias = (getattr(module, f"{name}_bias", None) for name in (up, "down_proj"))
        weights = getattr(module, up), up_bias, module.down_proj, down_bias
        return self.kernels.mixed_experts(states, experts, shares, *weights, *self.form)


def is_experts(module: nn.Module) -> bool:
    """Whether transformers knows the module as the experts of a mixture, with weights of three dimensions."""
    names = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated", "down_proj")
    down = getattr(module, "down_proj", None)
    return all(hasattr(module, name) for name in names) and isinstance(down, nn.Parameter) and down.dim() == 3


def expert_forms(module: nn.Module) -> list[ExpertForm]:
    """What such a module may compute, by its settings."""
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
        return []
    layout = module.is_transposed, not module.is_concatenated
    if not module.has_gate:
        return [ExpertForm(RELU_SQUARED, *layout)] if is_like(module, lambda x: x.relu().square()) else []
    forms = []
    if _has_plain_gate(module) and (activation := find_activation(module)) is not None:
        forms.append(ExpertForm(activation, *layout))
    alpha, limit = (getattr(module, name, getattr(module, f"swiglu_{name}", None)) for name in ("alpha", "limit"))
    if isinstance(alpha, float) and isinstance(limit, float):
        forms.append(ExpertForm(CLAMPED, *layout, alpha, limit))
    return forms


def _has_plain_gate(module: nn.Module) -> bool:
    """Whether its gate is transformers' own, and not one of its class."""
    return type(module)._apply_gate.__module__ == "transformers.integrations.moe"
