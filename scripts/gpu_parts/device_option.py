"""The option `--device` of the commands for a GPU."""

from __future__ import annotations

import argparse

import torch

from stand.forward.devices import is_nvidia


def cpu_or_gpu(text: str) -> str:
    """An argument type: "cpu", "cuda" or "cuda:1", of GPUs that torch sees where it sees any."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in {"cpu", "cuda"}:
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or a numbered GPU such as cuda:1, got {text!r}")
    if device.type == "cuda" and not is_nvidia(device):
        raise argparse.ArgumentTypeError(f"must be an NVIDIA GPU or cpu, got {text!r} of a torch for ROCm")
    if device.index and torch.cuda.is_available() and device.index >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"must be one of the {torch.cuda.device_count()} GPUs that torch sees, counted from cuda:0, got {text!r}"
        )
    return text
