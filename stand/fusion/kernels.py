"""What fused modules compute with: Triton's kernels on a GPU or in its interpreter, compiled ones on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Kernel = Callable[..., torch.Tensor]


class Kernels(NamedTuple):
    """As `stand.gpu.kernels.norm`, `.swiglu` and `.rope` describe them."""

    rms_norm: Kernel
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gated_product: Kernel
    rope_and_store: Kernel


def triton_kernels() -> Kernels:
    """Imports Triton."""
    from stand.gpu.kernels.norm import add_rms_norm, rms_norm
    from stand.gpu.kernels.rope import rope_and_store
    from stand.gpu.kernels.swiglu import gated_product

    return Kernels(rms_norm, add_rms_norm, gated_product, rope_and_store)


def cpu_kernels() -> Kernels:
    """For float32."""
    from stand.fusion.cpu_kernels import add_rms_norm, gated_product, rms_norm, rope_and_store

    return Kernels(rms_norm, add_rms_norm, gated_product, rope_and_store)
