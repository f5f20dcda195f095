"""Arrays of the host on a device."""

from __future__ import annotations

import numpy as np
import torch

from stand.forward.devices import is_nvidia


def uploaded(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """On the device. Nobody waits for what runs on a GPU of NVIDIA, as torch does where memory is not page-locked."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if is_nvidia(device) else tensor.to(device)
