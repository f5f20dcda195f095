"""Where a model lies: on one device, layer by layer on several, or off them between forwards (accelerate); and how
arrays get there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import distributed
from torch.nn import Conv1d, Module

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # some builds of torch have none

META = torch.device("meta")  # where offloaded weights lie between forwards


def input_device(model: Module) -> torch.device:
    """Where the ids of its tokens go: where its first weight lies or, if that is offloaded, where it is computed with.
    `model.device` would say meta then."""
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if not weight.is_meta:
                return weight.device
            place = _computing_device(module)
            if place is not None:
                return place
    return META


def is_nvidia(device: torch.device) -> bool:
    """Whether it is a GPU of NVIDIA, for which the kernels are: torch for ROCm calls AMD's "cuda", too."""
    return device.type == "cuda" and torch.version.hip is None


def uploaded(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """On the device. Nobody waits for what runs on a GPU of NVIDIA, as torch does where memory is not page-locked."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if is_nvidia(device) else tensor.to(device)


def off_one_device(model: Module) -> str:
    """In words, how it lies where that is not on one device: else nothing."""
    if (group := tensor_group(model)) is not None:
        return f"in {group.size()} processes"
    if is_sharded(model):
        return f"sharded over {number_of_processes()}"
    places = {weight.device for weight in model.parameters()}
    return "offloaded" if META in places else f"on {len(places)} devices" if len(places) > 1 else ""


def is_offloaded(model: Module) -> bool:
    """Whether some of its weights lie on no device until a forward asks for them."""
    return any(weight.is_meta for weight in model.parameters())


def number_of_processes() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def is_sharded(model: Module) -> bool:
    """Whether its weights are parts of themselves that are brought together for a forward (FSDP 1 and 2, ZeRO-3)."""
    if any(hasattr(weight, "ds_id") for weight in model.parameters()):
        return True
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not without a reason: it takes long to import
    return fsdp is not None and any(
        isinstance(part, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)) for part in model.modules()
    )


def is_shared(model: Module) -> bool:
    """Whether processes hold parts of its weights, in either way that is served."""
    return tensor_group(model) is not None or is_sharded(model)


def is_split(model: Module) -> bool:
    """Whether processes share its weights otherwise than by tensor parallelism alone or shards alone (pipelines)."""
    if tensor_group(model) is not None or (is_sharded(model) and (getattr(model, "_tp_size", None) or 1) == 1):
        return False
    meshes = [getattr(weight, "device_mesh", None) for weight in model.parameters()]
    meshes.append(getattr(model, "_device_mesh", None))
    return (getattr(model, "_tp_size", None) or 1) > 1 or any(mesh is not None and mesh.size() > 1 for mesh in meshes)


def tensor_group(model: Module) -> ProcessGroup | None:
    """That of the processes between which transformers has split the model's tensors, where they are split in no other
    way beside (`DistributedConfig(tp_size=)`)."""
    mesh = getattr(model, "_device_mesh", None)
    size = getattr(getattr(model.config, "distributed_config", None), "tp_size", None) or 1
    if mesh is None or not 1 < size == mesh.size():
        return None
    return mesh.get_group() if mesh.ndim == 1 else mesh["tp"].get_group()


@contextmanager
def brought_weights(layer: Module) -> Iterator[None]:
    """Within it a layer's convolution has its weights. Where they are offloaded, accelerate brings them when its own
    forward is called, which the layer does not do."""
    hooked = [part for part in layer.children() if isinstance(part, Conv1d) and hasattr(part, "_hf_hook")]
    for part in hooked:
        part._hf_hook.pre_forward(part)
    try:
        yield
    finally:
        for part in hooked:
            part._hf_hook.post_forward(part, ())


def _computing_device(module: Module) -> torch.device | None:
    """That of the hook by which accelerate brings the module's weights."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):  # several hooks are one of them
        place = getattr(each, "execution_device", None)
        if place is not None:
            return torch.device(place)
    return None
