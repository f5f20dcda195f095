"""The forward of a gated feed-forward block: one product for gate and up, one kernel for the gate, one for down."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import gelu, silu

from stand.fusion.formulas import GELU_ERF, GELU_TANH, SILU
from stand.fusion.forwards.merged_linear import MergedLinear
from stand.fusion.kernels import Kernels

REFERENCES = {
    SILU: silu,
    GELU_TANH: lambda x: gelu(x, approximate="tanh"),
    GELU_ERF: gelu,
}

REACHES = (8, 100)  # of values: where activations bend, and where some of them are cut off


class FusedMLP:
    """Stands for `module.forward`; `merged` is gate_proj and up_proj in one, None where they could not be merged.

    A module with gate_up_proj (Phi 3) has them in one already, the gate first.
    """

    def __init__(self, module: nn.Module, activation: int, kernels: Kernels, *, merged: MergedLinear | None):
        self.module = module
        self.kernels = kernels
        self.activation = activation
        self.merged = merged
        self.direct = kernels.direct_layers(module)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_and_up(hidden_states)
        return self._linear("down_proj", self.kernels.gated_product(gate, up, self.activation))

    def _gate_and_up(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.merged is not None:
            return self.merged.split(hidden_states)
        if hasattr(self.module, "gate_up_proj"):
            return self._linear("gate_up_proj", hidden_states).chunk(2, dim=-1)
        return self.kernels.linears(self.module, ("gate_proj", "up_proj"), hidden_states, self.direct)

    def _linear(self, name: str, states: torch.Tensor) -> torch.Tensor:
        return self.kernels.linear(self.module, name, states, self.direct)


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether the module has the parts of a gated feed-forward block, by their usual names."""
    children = dict(module.named_children())
    has_pair = "gate_proj" in children and "up_proj" in children
    return (has_pair or "gate_up_proj" in children) and "down_proj" in children


def activation_name(module: nn.Module) -> str | None:
    """What the block calls the module that is its activation, if it is one."""
    return next((name for name in ("act_fn", "activation_fn") if name in module._modules), None)


def find_activation(module: nn.Module) -> int | None:
    """Which activation the block applies; None where there is no kernel."""
    return next((activation for activation, reference in REFERENCES.items() if is_like(module, reference)), None)


def is_like(module: nn.Module, reference: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether the block's activation is that function, told by its values in float32."""
    function = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    if function is None or (isinstance(function, nn.Module) and function.state_dict()):
        return False
    grid = torch.cat([torch.linspace(-reach, reach, 257, device="cpu") for reach in REACHES])
    return torch.allclose(function(grid), reference(grid), rtol=1e-6, atol=1e-6)
