"""What every launcher of a Triton kernel does alike."""

from __future__ import annotations

import torch
from triton.runtime.jit import JITFunction


def check_device(kernel: object, tensor: torch.Tensor) -> None:
    """Raise ValueError where `kernel` was compiled for a GPU and `tensor` lies on the CPU."""
    if tensor.device.type == "cpu" and isinstance(kernel, JITFunction):
        raise ValueError(
            "a Triton kernel needs tensors on a GPU, got one on the CPU; move them there, "
            "or set TRITON_INTERPRET=1 before stand.gpu is imported to run it in the interpreter"
        )
