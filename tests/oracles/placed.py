"""Tensors with values on devices that this machine has not: each claims one, and lies on the CPU.

An operation over two devices raises, as torch's own do. `FakeTensorMode` has such devices, but no values to compare.
They are called xla:0, xla:1 ...: torch would initialise the drivers of CUDA before any mode sees a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ATEN = torch.ops.aten
CPU = torch.device("cpu")
ANYWHERE = torch.device("meta")  # what torch's own C++ makes beside a `Placed`: for C++ these lie there
COPIES = {ATEN._to_copy.default, ATEN.copy_.default}  # from any device to any other one
INDEXED = {ATEN.index.Tensor, ATEN.index_put_.default, ATEN._index_put_impl_.default}  # by tensors of the CPU, too


class Placed(torch.Tensor):
    """`inner`, a plain tensor of the CPU, that claims to lie on `place`."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, place: torch.device) -> Placed:
        shape = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device="meta", **shape)

    def __init__(self, inner: torch.Tensor, place: torch.device):
        self.inner, self.place = inner, place

    @property
    def device(self) -> torch.device:
        return self.place

    @property
    def is_meta(self) -> bool:
        return False

    def tolist(self) -> list:
        return self.inner.tolist()

    def __setitem__(self, index: object, value: object) -> None:
        """A number would become a tensor of the device that lies behind, which has no values."""
        is_tensor = isinstance(value, torch.Tensor)
        super().__setitem__(index, value if is_tensor else Placed(torch.tensor(value, dtype=self.dtype), self.place))

    def __repr__(self) -> str:
        return f"Placed({self.inner}, {self.place})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


class _Places(TorchDispatchMode):
    """Sees what makes tensors of none."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


class _Literals(TorchFunctionMode):
    """`torch.tensor`, which no dispatch mode sees."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is not torch.tensor:
            return function(*args, **kwargs)
        place = kwargs.pop("device", None)
        made = torch.tensor(*args, **kwargs)
        return made if place is None else made.to(place)


@contextmanager
def devices() -> Iterator[None]:
    """Within it tensors can be made on, and brought to, xla:0, xla:1 ..."""
    with _Literals(), _Places():
        yield


def run(function: Callable, args: tuple, kwargs: dict) -> object:
    """The operation on the CPU; what it returns lies where its tensors lie, or where it was asked for."""
    asked = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.device)]
    place = asked[0] if asked else _place(function, args, kwargs)
    plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
    result = function(*plain_args, **plain_kwargs)
    if function._schema.is_mutable:  # returns what it was given
        return args[0] if isinstance(args[0], torch.Tensor) else result
    return tree_map(lambda one: _placed(one, place), result)


def _plain(value: object) -> object:
    """What stands for it on the CPU."""
    if isinstance(value, torch.device):
        return CPU
    return value.inner if isinstance(value, Placed) else value


def _placed(value: object, place: torch.device) -> object:
    return Placed(value, place) if isinstance(value, torch.Tensor) and place != CPU else value


def _place(function: Callable, args: tuple, kwargs: dict) -> torch.device:
    """Where all tensors of a call lie. Raises RuntimeError where they lie on several devices."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    if function in COPIES or not tensors:
        return tensors[0].device if tensors else CPU
    placed = tensors[:1] if function in INDEXED else tensors
    places = {tensor.device for tensor in placed if tensor.dim() or tensor.device != CPU}
    if function in INDEXED:
        places |= {tensor.device for tensor in tensors if tensor.device != CPU}
    places = places - {ANYWHERE} or places
    if len(places) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, got {sorted(map(str, places))} in {function}"
        )
    return places.pop() if places else CPU
