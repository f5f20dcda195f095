"""Where a kernel may run: on CUDA tensors, or on CPU tensors under Triton's interpreter."""

from __future__ import annotations

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction


def is_interpreted(kernel: object) -> bool:
    """Whether a decorated kernel runs in Triton's interpreter (chosen when it was decorated)."""
    return isinstance(kernel, InterpretedFunction)


def launch_device(kernel: triton.JITFunction | InterpretedFunction, tensor: torch.Tensor) -> torch.cuda.device_of:
    """Context that makes the tensor's device the current one, which is where Triton launches.

    Raises ValueError for a CPU tensor without the interpreter.
    """
    if tensor.device.type == "cpu" and not is_interpreted(kernel):
        name = getattr(kernel, "__name__", type(kernel).__name__)
        raise ValueError(
            f"a Triton kernel needs CUDA tensors, got {name.lstrip('_')} with a tensor on the CPU; move the tensors to "
            "a GPU, or set TRITON_INTERPRET=1 before the first import to run it in the interpreter"
        )
    return torch.cuda.device_of(tensor)
