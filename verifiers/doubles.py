"""64-bit floats, in which rules compute: some devices have none, so their tensors come to the host."""

from __future__ import annotations

import torch

WITHOUT_DOUBLES = ("mps",)  # types of devices


def where_doubles_are(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy on the host where its device has no 64-bit floats."""
    return tensor.cpu() if tensor.device.type in WITHOUT_DOUBLES else tensor
