"""Where a kernel may run: on CUDA tensors, or on CPU tensors under Triton's interpreter; and on what numbers."""

from __future__ import annotations

import re

import numpy as np
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # of states and weights, for the kernels of modules


def is_interpreted(kernel: object) -> bool:
    """Whether a decorated kernel runs in Triton's interpreter (chosen when it was decorated)."""
    return isinstance(kernel, InterpretedFunction)


def interpreter_obstacle() -> str | None:
    """Why Triton's interpreter cannot run here, or None. Compiled kernels are not affected."""
    if version_numbers(triton.__version__) < (3, 7) and version_numbers(np.__version__) >= (2, 4):
        return (
            f"the interpreter of triton {triton.__version__} fails with numpy >= 2.4 (triton #9171), got numpy "
            f"{np.__version__}; install numpy < 2.4 or triton >= 3.7"
        )
    if version_numbers(triton.__version__) == (3, 9, 0):
        return (
            "the interpreter of triton 3.9.0 takes conditions on single numbers for integers and refuses such masks; "
            "install another version"
        )
    return None


def version_numbers(text: str) -> tuple[int, ...]:
    """The first three of a version, such as (3, 7, 1)."""
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def launch_device(kernel: triton.JITFunction | InterpretedFunction, tensor: torch.Tensor) -> torch.cuda.device_of:
    """Context that makes the tensor's device the current one, which is where Triton launches.

    Raises ValueError for a CPU tensor without the interpreter, RuntimeError where that cannot run.
    """
    if tensor.device.type == "cpu" and not is_interpreted(kernel):
        name = getattr(kernel, "__name__", type(kernel).__name__)
        raise ValueError(
            f"a Triton kernel needs CUDA tensors, got {name.lstrip('_')} with a tensor on the CPU; move the tensors to "
            "a GPU, or set TRITON_INTERPRET=1 before the first import to run it in the interpreter"
        )
    if tensor.device.type == "cpu" and (obstacle := interpreter_obstacle()):
        raise RuntimeError(obstacle)
    return torch.cuda.device_of(tensor)
