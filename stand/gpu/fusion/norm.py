"""The forward of an RMSNorm module as one kernel."""

from __future__ import annotations

import torch
from torch import nn

from stand.gpu.kernels.norm import rms_norm


class FusedNorm:
    """Stands for `module.forward`; `rule` is one of `norm_kernel.RULES`, found by trial."""

    def __init__(self, module: nn.Module, rule: int):
        self.module = module
        self.rule = rule

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.module.weight, norm_epsilon(self.module), self.rule)


def norm_epsilon(module: nn.Module) -> float:
    """The constant under the root; transformers has two names for it."""
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


def norm_refusal(module: nn.Module) -> str:
    """Why a module named ...RMSNorm is left alone without a trial, "" if it can be tried."""
    if getattr(module, "weight", None) is None:
        return "no weight"
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return "" if isinstance(epsilon, float) else "no constant epsilon"
