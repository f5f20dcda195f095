"""The forward of an RMSNorm module as one kernel, with or without the addition before it."""

from __future__ import annotations

import torch
from torch import nn

from stand.fusion.kernels import Kernels


class FusedNorm:
    """Stands for `module.forward`; `rule` is one of `formulas.RULES`, found by trial."""

    def __init__(self, module: nn.Module, rule: int, kernels: Kernels):
        self.module = module
        self.kernels = kernels
        self.rule = rule
        self._expected: tuple[torch.Tensor, torch.Tensor] | None = None  # states that will come, and their norm

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] is hidden_states:
            return expected[1]
        return self.kernels.rms_norm(hidden_states, self.module.weight, norm_epsilon(self.module), self.rule)

    def after_adding(self, states: torch.Tensor, change: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """states + change, and its norm."""
        weight, epsilon = self.module.weight, norm_epsilon(self.module)
        return self.kernels.add_rms_norm(states, change, weight, epsilon, self.rule)

    def expect(self, states: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        """states + change, whose norm the next call gives without a kernel if it gets this very tensor."""
        self._expected = self.after_adding(states, change)
        return self._expected[0]

    def clear(self) -> None:
        """Let go of what did not come."""
        self._expected = None


def norm_epsilon(module: nn.Module) -> float:
    """The constant under the root; transformers has two names for it."""
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


def norm_refusal(module: nn.Module) -> str:
    """Why a module named ...RMSNorm is left alone without a trial, "" if it can be tried."""
    if getattr(module, "weight", None) is None:
        return "no weight"
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return "" if isinstance(epsilon, float) else "no constant epsilon"
