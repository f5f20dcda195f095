"""CUDA tensors without a GPU, without values, and without a torch that knows CUDA.

`FakeTensorMode` gives tensors a device, a shape and a dtype, but no values, so that whatever would wait for one raises.
Indexing, however, asks for the device's guard before any mode sees it, and a CPU build of torch has none; here it goes
through the operators that it stands for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from stand.fusion.forwards.merged_linear import MergedLinear
from stand.fusion.fusion import Fusion


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Run the block on fake tensors; make them with device="cuda"."""
    fits = patch("stand.gpu.device_cache._free_bytes", lambda device: float("inf"))  # asks the driver
    reads, writes = patch.object(FakeTensor, "__getitem__", _indexed), patch.object(FakeTensor, "__setitem__", _assign)
    copies = patch.object(FakeTensor, "copy_", lambda tensor, *others: torch.ops.aten.copy_(tensor, *others))
    opposites = patch.object(FakeTensor, "__invert__", lambda tensor: torch.ops.aten.bitwise_not(tensor))
    with reads, writes, copies, opposites, fits, FakeTensorMode():
        yield


def onto_fake_device(model: torch.nn.Module) -> torch.nn.Module:
    """The same modules with parameters, buffers and further tensors on the fake device; to be called inside
    `fake_cuda`."""
    for module in model.modules():
        for name, own in [*module.named_parameters(recurse=False)]:
            fake = torch.empty(own.shape, dtype=own.dtype, device="cuda")
            module.register_parameter(name, torch.nn.Parameter(fake, requires_grad=False))
        others = [(name, own) for name, own in vars(module).items() if isinstance(own, torch.Tensor)]
        for name, own in [*module.named_buffers(recurse=False), *others]:
            setattr(module, name, torch.empty(own.shape, dtype=own.dtype, device="cuda"))
    return model


def mirrored(fusion: Fusion, model: torch.nn.Module) -> Fusion:
    """The swaps of `fusion` on a model of fake tensors, without proof and with torch's products."""
    merged = {
        owner: MergedLinear([model.get_submodule(f"{owner}.{part}") for part in parts])
        for owner, parts in fusion.recipe.merged.items()
    }
    return Fusion(model, fusion.recipe, fusion.kernels, merged=merged, report=fusion.report)


def _indexed(tensor: torch.Tensor, index: object) -> torch.Tensor:
    """Integers, slices, None, one ellipsis and tensors."""
    view, indices = _split(tensor, index)
    return view if indices is None else torch.ops.aten.index(view, indices)


def _assign(tensor: torch.Tensor, index: object, value: torch.Tensor) -> None:
    view, indices = _split(tensor, index)
    if indices is None:
        torch.ops.aten.copy_(view, value)
    else:
        torch.ops.aten.index_put_(view, indices, value)


def _split(tensor: torch.Tensor, index: object) -> tuple[torch.Tensor, list | None]:
    """The view by all that is not a tensor, and the tensors by dimension of it (None where there are none)."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        place = next(place for place, part in enumerate(parts) if part is Ellipsis)
        missing = tensor.dim() - sum(part is not None for part in parts) + 1
        parts[place : place + 1] = [slice(None)] * missing
    indices: list[torch.Tensor | None] = []
    for part in parts:
        dim = len(indices)
        if isinstance(part, int):
            tensor = tensor.select(dim, part)
            continue
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
        elif not isinstance(part, torch.Tensor):
            raise TypeError(f"fake CUDA tensors take no index of type {type(part).__name__}")
        indices.append(part if isinstance(part, torch.Tensor) else None)
    return tensor, indices if any(part is not None for part in indices) else None
