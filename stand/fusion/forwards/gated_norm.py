"""The forward of an RMSNorm with a gate, which ends layers with a recurrent state, as one kernel."""

from __future__ import annotations

import torch
from torch import nn

from stand.fusion.forwards.norm import norm_epsilon
from stand.fusion.kernels import Kernels


class FusedGatedNorm:
    """Stands for `module.forward`; `order` is one of `formulas.GATE_ORDERS`, found by trial."""

    def __init__(self, module: nn.Module, order: int, kernels: Kernels):
        self.module = module
        self.order = order
        self.kernels = kernels

    def __call__(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        if gate is None:
            return type(self.module).forward(self.module, hidden_states)
        weight, group = self.module.weight, getattr(self.module, "group_size", hidden_states.shape[-1])
        return self.kernels.gated_rms_norm(hidden_states, gate, weight, norm_epsilon(self.module), group, self.order)


def is_gated_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNormGated")
