"""The forward of a mixture's experts: their weights are read once, however many tokens come to them.

For any class under transformers' `use_experts_implementation`, whose weights and settings have the same names. Which
experts a token goes to, and with what share, the model's own router says.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import nn

from stand.fusion.formulas import CLAMPED, MOST_EXPERT_TOKENS, RELU_SQUARED
from stand.fusion.forwards.mlp import REACHES, REFERENCES, is_like
from stand.fusion.kernels import Kernels

GRID = 33  # values of a gate that are looked at, for each of its reaches
MOST_TOKENS_OF_AN_EXPERT = 64  # on average, on a CPU: with more, the module's own products are as fast


class ExpertForm(NamedTuple):
    """How an expert computes, as `stand.gpu.kernels.experts.mixed_experts` takes it."""

    activation: int  # one of `formulas`
    is_transposed: bool  # whether outputs are columns of the weights
    is_interleaved: bool  # whether gates are every other output, and not the first half
    alpha: float = 0.0  # of CLAMPED
    limit: float = 0.0


class FusedExperts:
    """Stands for `module.forward`; `form` was found by trial. What the kernels refuse is left to the module's own."""

    def __init__(self, module: nn.Module, form: ExpertForm, kernels: Kernels):
        self.module = module
        self.form = form
        self.kernels = kernels
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """hidden_states [M, H], experts [M, k] and shares [M, k], by whatever names -> [M, H]."""
        states, experts, shares = bound = self._bound(given, named)
        module = self.module
        is_few = experts.numel() <= MOST_TOKENS_OF_AN_EXPERT * module.num_experts
        is_few = is_few or states.device.type == "cuda"  # a recorded step may hold them
        if len(states) <= MOST_EXPERT_TOKENS and is_few:
            with suppress(ValueError, IndexError):  # before anything is computed
                return self._mixed(bound)
        return type(module).forward(module, *bound)

    def mixed(self, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """The same by the kernels. Raises ValueError and IndexError as they do."""
        return self._mixed(self._bound(given, named))

    def _mixed(self, bound: Sequence[torch.Tensor]) -> torch.Tensor:
        module, up = self.module, "gate_up_proj" if self.module.has_gate else "up_proj"
        biases = [getattr(module, f"{name}_bias") if module.has_bias else None for name in (up, "down_proj")]
        weights = getattr(module, up), biases[0], module.down_proj, biases[1]
        return self.kernels.mixed_experts(*bound, *weights, *self.form)

    def _bound(self, given: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """In their order."""
        arguments = dict(zip(self._names, given, strict=False)) | named
        return [arguments[name] for name in self._names]


def is_experts(module: nn.Module) -> bool:
    """Whether transformers knows the module as the experts of a mixture, with weights of three dimensions."""
    names = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated", "down_proj")
    down = getattr(module, "down_proj", None)
    return all(hasattr(module, name) for name in names) and isinstance(down, nn.Parameter) and down.dim() == 3


def expert_forms(module: nn.Module) -> list[ExpertForm]:
    """What such a module may compute, by its settings, and by what its gate makes of numbers of any size: the states of
    a trial need not reach a limit."""
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
        return []
    layout = module.is_transposed, not module.is_concatenated
    if not module.has_gate:
        return [ExpertForm(RELU_SQUARED, *layout)] if is_like(module, lambda x: x.relu().square()) else []
    forms = [ExpertForm(activation, *layout) for activation in REFERENCES]
    alpha, limit = (getattr(module, name, getattr(module, f"swiglu_{name}", None)) for name in ("alpha", "limit"))
    if isinstance(alpha, float) and isinstance(limit, float):
        forms.append(ExpertForm(CLAMPED, *layout, alpha, limit))
    return [form for form in forms if _has_gate(module, form)][:1]


def _has_gate(module: nn.Module, form: ExpertForm) -> bool:
    """Whether the module's gate is that of the form, told by its values in float32."""
    values = torch.cat([torch.linspace(-reach, reach, GRID, device="cpu") for reach in (*REACHES, 2 * form.limit)])
    pairs = torch.cartesian_prod(values, values)  # of gate and up
    gate, up = pairs.unbind(1)
    if form.activation == CLAMPED:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        expected = (up + 1) * gate * torch.sigmoid(form.alpha * gate)
    else:
        expected = REFERENCES[form.activation](gate) * up
    try:
        found = module._apply_gate(pairs)[:, 0]
    except Exception:  # it asks for more than two numbers, or for another device
        return False
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
