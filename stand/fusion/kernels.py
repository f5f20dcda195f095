"""What fused modules compute with: Triton's kernels on a GPU or in its interpreter, compiled ones on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from stand.forward.few_tokens.linear_layers import outputs
from stand.forward.recurrent.tree_scan import Scan
from stand.fusion.formulas import HALVES, PAIRINGS
from stand.fusion.forwards.merged_linear import is_bare

Kernel = Callable[..., torch.Tensor]


class Kernels(NamedTuple):
    """As `stand.gpu.kernels.norm`, `.swiglu`, `.rope`, `.experts`, `.gated_norm`, `.rotate` and `.route` describe them;
    the last three of these are for GPUs alone, and so is `chain_scan` of `stand.gpu.kernel_scan`.

    calls_forwards: whether plain linear layers are run by their forwards, past what a module does around it.
    pairings: of `formulas.PAIRINGS`, which `rope_and_store` knows.
    """

    rms_norm: Kernel
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gated_product: Kernel
    rope_and_store: Kernel
    mixed_experts: Kernel
    gated_rms_norm: Kernel | None = None
    rotate_pair: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    softmax_route: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    sigmoid_route: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    chain_scan: Callable[..., Scan] | None = None
    calls_forwards: bool = False
    pairings: tuple[int, ...] = (HALVES,)

    def linear(self, module: nn.Module, name: str, states: torch.Tensor, direct: frozenset[nn.Module]) -> torch.Tensor:
        """What the child `name` of `module` makes of the states; by its forward where it is one of `direct`."""
        layer = module._modules[name]
        return layer.forward(states) if layer in direct else layer(states)

    def linears(
        self, module: nn.Module, names: Sequence[str], states: torch.Tensor, direct: frozenset[nn.Module]
    ) -> Sequence[torch.Tensor]:
        """The same for children of one input; together where all are of `direct`."""
        layers = [module._modules[name] for name in names]
        return outputs(layers, states) if direct.issuperset(layers) else [layer(states) for layer in layers]

    def direct_layers(self, module: nn.Module) -> frozenset[nn.Module]:
        """The children of `module` that need not be called: plain linear layers without hooks."""
        if not self.calls_forwards:
            return frozenset()
        return frozenset(child for child in module.children() if type(child) is nn.Linear and is_bare(child))


def triton_kernels() -> Kernels:
    """Imports Triton."""
    from stand.gpu.kernel_scan import chain_scan
    from stand.gpu.kernels.experts import mixed_experts
    from stand.gpu.kernels.norm import add_rms_norm, rms_norm
    from stand.gpu.kernels.recurrent.gated_norm import gated_rms_norm
    from stand.gpu.kernels.rope import rope_and_store
    from stand.gpu.kernels.rotate import rotate_pair
    from stand.gpu.kernels.route import sigmoid_route, softmax_route
    from stand.gpu.kernels.swiglu import gated_product

    every_day = rms_norm, add_rms_norm, gated_product, rope_and_store, mixed_experts
    others = gated_rms_norm, rotate_pair, softmax_route, sigmoid_route, chain_scan
    return Kernels(*every_day, *others, pairings=PAIRINGS)


def cpu_kernels() -> Kernels:
    """For float32 and bfloat16."""
    from stand.fusion.cpu.experts import mixed_experts
    from stand.fusion.cpu.kernels import add_rms_norm, gated_product, rms_norm, rope_and_store

    return Kernels(rms_norm, add_rms_norm, gated_product, rope_and_store, mixed_experts, calls_forwards=True)
