"""An H100 without values: tensors on it have shapes and types, and nothing may go from there to the host."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import torch
from fake_cuda import fake_cuda
from no_host_copy import NoHostCopy

from stand.gpu import step_body
from stand.gpu.head_runs import recorder, run_packet
from stand.gpu.packets import step_packet


class FakeDevice:
    """What `torch.cuda.get_device_properties` says of an H100."""

    multi_processor_count, shared_memory_per_block_optin = 132, 227 * 1024


class FakePacket:
    """The device half of a packet; its copies are those that `Packet` makes without waiting."""

    def __init__(self, fields, device):
        self.host = {name: np.zeros(shape, dtype=dtype) for name, (dtype, shape) in fields.items()}
        names = {name: getattr(torch, np.dtype(dtype).name) for name, (dtype, _) in fields.items()}
        self.device = {name: torch.empty(fields[name][1], dtype=names[name], device=device) for name in fields}

    def upload(self):
        pass

    def download(self):
        pass


@contextmanager
def fake_device():
    """`fake_cuda`, without copies to the host other than the packets' own."""
    with ExitStack() as stack:
        for module in (step_body, step_packet, run_packet, recorder):
            stack.enter_context(patch.object(module, "Packet", FakePacket))
        stack.enter_context(patch("torch.cuda.get_device_capability", lambda device: (9, 0)))
        stack.enter_context(patch("torch.cuda.get_device_properties", lambda device: FakeDevice))
        stack.enter_context(fake_cuda())
        stack.enter_context(NoHostCopy())
        yield
