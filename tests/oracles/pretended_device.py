"""A model on a GPU of Apple, Intel or AMD, without one: "mps", "xpu" and "cuda", as torch calls them.

Tensors of that name compute on the CPU. As on those devices tensors of two devices do not meet, nothing of them can be
read in place, some have no 64-bit floats, and on an Intel GPU a copy that nobody waits for may read what is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import torch
from torch.nn import Module, Parameter
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# In torch's errors: of a build without CUDA, and of one with it where no GPU is.
UNKNOWN = (
    "not linked with support for",
    "not compiled with",
    "Inplace update to inference tensor",
    "Found no NVIDIA driver",
    "driver version is insufficient",
)
COPY = torch.ops.aten.copy_.default
# An index may lie on a CPU.
MAY_MEET = {
    COPY,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}


class Elsewhere(torch.Tensor):
    """Says that it lies on `place`, and has its numbers in `own`."""

    place: ClassVar[torch.device]
    has_doubles: ClassVar[bool] = True

    @staticmethod
    def __new__(cls, own: torch.Tensor) -> Elsewhere:
        if not cls.has_doubles and own.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"Cannot convert a tensor to float64 dtype as {cls.place.type} doesn't support float64.")
        layout = {"strides": own.stride(), "storage_offset": own.storage_offset(), "dtype": own.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, own.size(), **layout, device=cls.place)

    def __init__(self, own: torch.Tensor):
        self.own = own

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with Pretended(cls):
            return func(*args, **(kwargs or {}))


class OnMps(Elsewhere):
    """An Apple chip's GPU."""

    place, has_doubles = torch.device("mps", 0), False


class OnXpu(Elsewhere):
    """A GPU of Intel."""

    place = torch.device("xpu", 0)


class OnArc(OnXpu):
    """One of Intel's without 64-bit floats."""

    has_doubles = False


class OnRocm(Elsewhere):
    """A GPU of AMD."""

    place = torch.device("cuda", 0)


class Pretended(TorchDispatchMode):
    """Within it torch knows tensors of this kind. operations: names of what was computed with them."""

    def __init__(self, kind: type[Elsewhere]) -> None:
        super().__init__()
        self._kind = kind
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        asked = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        lies = any(isinstance(tensor, Elsewhere) for tensor in tensors)
        there = asked[0].type == self._kind.place.type if asked else lies
        if not (lies or there):
            return func(*args, **(kwargs or {}))
        if lies and not asked and func not in MAY_MEET:
            _refuse_others(tensors, self._kind.place)
        if func is COPY:
            there = isinstance(args[0], Elsewhere)
        self.operations.add(str(func))
        own = {id(tensor.own): tensor for tensor in tensors if isinstance(tensor, Elsewhere)}
        on_host = partial(_on_host, self._kind)
        result = func(*tree_map(on_host, args), **tree_map(on_host, kwargs or {}))
        return tree_map(lambda leaf: own.get(id(leaf), _there(self._kind, leaf)) if there else leaf, result)


def _refuse_others(tensors: list[torch.Tensor], place: torch.device) -> None:
    if not all(isinstance(tensor, Elsewhere) or tensor.dim() == 0 for tensor in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two, {place} and cpu")


def _there(kind: type[Elsewhere], leaf: object) -> object:
    return kind(leaf) if isinstance(leaf, torch.Tensor) else leaf


def move_to(kind: type[Elsewhere], *modules: Module) -> None:
    """All weights of modules, which may share some."""
    for module in (part for whole in modules for part in whole.modules()):
        for weight in (*module._parameters.values(), *module._buffers.values()):
            if weight is not None and not isinstance(weight, Elsewhere):
                there = kind(weight.detach())
                swap_tensors(weight, Parameter(there, requires_grad=False) if isinstance(weight, Parameter) else there)


class Redirected(TorchFunctionMode):
    """Calls in which torch would switch to a device that it was not built for."""

    def __init__(self, kind: type[Elsewhere]) -> None:
        super().__init__()
        self._kind = kind

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, kind = dict(kwargs or {}), self._kind
        to_host = partial(_on_host, kind)
        on_host = partial(func, *tree_map(to_host, args), **tree_map(to_host, kwargs))
        if func is torch.Tensor.numpy and isinstance(args[0], Elsewhere):
            raise TypeError(f"can't convert {kind.place} device type tensor to numpy. Use Tensor.cpu() first.")
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.to) and _names(kind, (args[1:], kwargs)):
            if kwargs.get("non_blocking") and kind.place.type == "xpu":
                raise RuntimeError("a copy that nobody waits for may read what is gone")
            return kind(on_host())
        if func is torch.Tensor.tolist:
            return on_host()
        if func is scaled_dot_product_attention and isinstance(args[0], Elsewhere):
            return kind(on_host())
        try:
            with torch.inference_mode(False), torch.no_grad():  # tensors of inference have no views of this kind
                return func(*args, **kwargs)
        except (RuntimeError, AssertionError) as error:
            if not any(text in str(error) for text in UNKNOWN):
                raise
        is_for_host = func in (torch.Tensor.cpu, torch.Tensor.to)
        return on_host() if is_for_host else tree_map(partial(_there, kind), on_host())


def _names(kind: type[Elsewhere], arguments: object) -> bool:
    return any(_on_host(kind, leaf) is not leaf for leaf in tree_leaves(arguments))


def _on_host(kind: type[Elsewhere], leaf: object) -> object:
    """What computes it: a tensor's own numbers, and the CPU for the name of the device."""
    if isinstance(leaf, Elsewhere):
        return leaf.own
    is_named = isinstance(leaf, (str, torch.device)) and str(leaf).startswith(kind.place.type)
    return torch.device("cpu") if is_named else leaf


@contextmanager
def pretended(kind: type[Elsewhere]) -> Iterator[Pretended]:
    with torch.no_grad(), Pretended(kind) as mode, Redirected(kind):
        yield mode
