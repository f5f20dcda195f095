"""64-bit floats, in which rules compute: some devices have none, so their tensors come to the host."""

from __future__ import annotations

import torch


def where_doubles_are(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy on the host where its device has no 64-bit floats."""
    return tensor if _has_doubles(tensor.device) else tensor.cpu()


def _has_doubles(device: torch.device) -> bool:
    """Of Intel's GPUs the first Arc ones have none."""
    return torch.xpu.get_device_properties(device).has_fp64 if device.type == "xpu" else device.type != "mps"
