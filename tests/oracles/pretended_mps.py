"""A model on "mps", an Apple chip's GPU as torch calls it, without one: what it refuses and what its memory is told.

Tensors of that name compute on the CPU. As on the chip there are no 64-bit floats, tensors of two devices do not meet,
and nothing of it can be read in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn import Module, Parameter
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

MPS = torch.device("mps", 0)
COPY = torch.ops.aten.copy_.default
# An index may lie on a CPU.
MAY_MEET = {
    COPY,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}


class OnMps(torch.Tensor):
    """Says that it lies on an Apple chip's GPU, and has its numbers in `own`."""

    @staticmethod
    def __new__(cls, own: torch.Tensor) -> OnMps:
        if own.dtype in (torch.float64, torch.complex128):
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        layout = {"strides": own.stride(), "storage_offset": own.storage_offset(), "dtype": own.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, own.size(), **layout, device=MPS)

    def __init__(self, own: torch.Tensor):
        self.own = own

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with PretendedMps():
            return func(*args, **(kwargs or {}))


class PretendedMps(TorchDispatchMode):
    """Within it torch knows such tensors. operations: names of what was computed with them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        asked = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        lies = any(isinstance(tensor, OnMps) for tensor in tensors)
        there = asked[0].type == "mps" if asked else lies
        if not (lies or there):
            return func(*args, **(kwargs or {}))
        if lies and not asked and func not in MAY_MEET:
            _refuse_others(tensors)
        if func is COPY:
            there = isinstance(args[0], OnMps)
        self.operations.add(str(func))
        own = {id(tensor.own): tensor for tensor in tensors if isinstance(tensor, OnMps)}
        result = func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs or {}))
        return tree_map(lambda leaf: own.get(id(leaf), _on_mps(leaf)) if there else leaf, result)


def _refuse_others(tensors: list[torch.Tensor]) -> None:
    if not all(isinstance(tensor, OnMps) or tensor.dim() == 0 for tensor in tensors):
        raise RuntimeError("Expected all tensors to be on the same device, but found at least two, mps:0 and cpu")


def _on_mps(leaf: object) -> object:
    return OnMps(leaf) if isinstance(leaf, torch.Tensor) else leaf


def move_to_mps(*modules: Module) -> None:
    """All weights of modules, which may share some."""
    for module in (part for whole in modules for part in whole.modules()):
        for weight in (*module._parameters.values(), *module._buffers.values()):
            if weight is not None and not isinstance(weight, OnMps):
                there = OnMps(weight.detach())
                swap_tensors(weight, Parameter(there, requires_grad=False) if isinstance(weight, Parameter) else there)


class Redirected(TorchFunctionMode):
    """Calls in which torch would switch to a device that it was not built for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        on_host = partial(func, *tree_map(_on_host, args), **tree_map(_on_host, kwargs))
        if func is torch.Tensor.numpy and isinstance(args[0], OnMps):
            raise TypeError("can't convert mps:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.to) and _names_mps((args[1:], kwargs)):
            return OnMps(on_host())
        if func is torch.Tensor.tolist:
            return on_host()
        if func is scaled_dot_product_attention and isinstance(args[0], OnMps):
            return OnMps(on_host())
        try:
            with torch.inference_mode(False), torch.no_grad():  # tensors of inference have no views of this kind
                return func(*args, **kwargs)
        except RuntimeError as error:
            if "not linked with support for mps" not in str(error):
                raise
        is_for_host = func in (torch.Tensor.cpu, torch.Tensor.to)
        return on_host() if is_for_host else tree_map(_on_mps, on_host())


def _names_mps(arguments: object) -> bool:
    return any(_on_host(leaf) is not leaf for leaf in tree_leaves(arguments))


def _on_host(leaf: object) -> object:
    """What computes it: a tensor's own numbers, and the CPU for the name of the device."""
    if isinstance(leaf, OnMps):
        return leaf.own
    is_named = isinstance(leaf, (str, torch.device)) and str(leaf).startswith("mps")
    return torch.device("cpu") if is_named else leaf


@contextmanager
def pretended_mps() -> Iterator[PretendedMps]:
    with torch.no_grad(), PretendedMps() as mode, Redirected():
        yield mode
