"""Products in float32 as they are written: machines set variables that round them to TF32."""

from __future__ import annotations

import os

import torch

VARIABLES = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")


def use_plain_float32() -> str:
    """Undo what the environment asks for, in this process and those that it starts, before the GPU is first used; which
    variables were set, "" for none. Engines refuse a model whose products are rounded."""
    found = [name for name in VARIABLES if os.environ.pop(name, None) is not None]
    torch.set_float32_matmul_precision("highest")
    return ", ".join(found)
