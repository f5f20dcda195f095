"""Many small arrays that travel as one copy: typed views into one buffer on the host and one on the device."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import torch

ALIGNMENT = 16  # bytes

Field = tuple[type, tuple[int, ...]]  # element type, shape


class Packet:
    """`host[name]` is a numpy array, `device[name]` a tensor of the same type and shape.

    Host memory is page-locked where the device is a GPU, so that both copies are asynchronous and can be captured.
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device):
        places, size = _places(fields)
        self._host = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.host: dict[str, np.ndarray] = {
            name: self._host[start:end].numpy().view(dtype).reshape(shape)
            for name, (start, end, dtype, shape) in places.items()
        }
        self.device: dict[str, torch.Tensor] = {
            name: self._device[start:end].view(_torch_type(dtype)).view(shape)
            for name, (start, end, dtype, shape) in places.items()
        }

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    def upload(self) -> None:
        """Host to device; does not wait."""
        self._device.copy_(self._host, non_blocking=True)

    def download(self) -> None:
        """Device to host; does not wait: the host arrays are valid once the stream has got here."""
        self._host.copy_(self._device, non_blocking=True)


def _places(fields: Mapping[str, Field]) -> tuple[dict[str, tuple[int, int, type, tuple[int, ...]]], int]:
    """Per field (start, end, type, shape) in bytes, and the total."""
    places, size = {}, 0
    for name, (dtype, shape) in fields.items():
        nbytes = np.dtype(dtype).itemsize * prod(shape)
        places[name] = (size, size + nbytes, dtype, shape)
        size += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return places, size


def _torch_type(dtype: type) -> torch.dtype:
    return getattr(torch, np.dtype(dtype).name)
