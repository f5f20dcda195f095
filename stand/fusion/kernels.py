"""What fused modules compute with: Triton's kernels on a GPU or in its interpreter, compiled ones on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from stand.fusion.product import direct_layers, direct_product

Kernel = Callable[..., torch.Tensor]


class Kernels(NamedTuple):
    """As `stand.gpu.kernels.norm`, `.swiglu` and `.rope` describe them.

    product: what a plain linear layer computes; None: layers are called.
    """

    rms_norm: Kernel
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gated_product: Kernel
    rope_and_store: Kernel
    product: Callable[[nn.Linear, torch.Tensor], torch.Tensor] | None = None

    def linear(self, module: nn.Module, name: str, states: torch.Tensor, direct: frozenset[nn.Module]) -> torch.Tensor:
        """What the child `name` of `module` makes of the states; by `product` where it is one of `direct`."""
        layer = module._modules[name]
        return self.product(layer, states) if layer in direct else layer(states)

    def direct_layers(self, module: nn.Module) -> frozenset[nn.Module]:
        """The children of `module` that need not be called."""
        return frozenset() if self.product is None else direct_layers(module)


def triton_kernels() -> Kernels:
    """Imports Triton."""
    from stand.gpu.kernels.norm import add_rms_norm, rms_norm
    from stand.gpu.kernels.rope import rope_and_store
    from stand.gpu.kernels.swiglu import gated_product

    return Kernels(rms_norm, add_rms_norm, gated_product, rope_and_store)


def cpu_kernels() -> Kernels:
    """For float32."""
    from stand.fusion.cpu_kernels import add_rms_norm, gated_product, rms_norm, rope_and_store

    return Kernels(rms_norm, add_rms_norm, gated_product, rope_and_store, direct_product)
