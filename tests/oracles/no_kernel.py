"""Kernels cut out of their launchers, so that launches can be counted on tensors without values."""

import importlib
import pkgutil
from contextlib import nullcontext

import torch
from specimens.registry import SPECIMENS
from torch.utils._python_dispatch import TorchDispatchMode

from stand.gpu import kernels

NOT_LAUNCHED = {"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "detach"}


class NoKernel:
    """Takes a launch and does nothing; `grids` remembers what was launched."""

    def __init__(self, name: str, grids: list):
        self.__name__, self.grids = name, grids

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *arguments, **options: None


def without_kernels(monkeypatch, module) -> list:
    """Cut out the module's kernels; returns the list of grids launched from now on."""
    grids: list = []
    for name in {specimen.kernel.__name__ for specimen in SPECIMENS[module.__name__.rsplit(".", 1)[1]]()}:
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, NoKernel(name, grids))
    if hasattr(module, "launch_device"):
        monkeypatch.setattr(module, "launch_device", lambda kernel, tensor: nullcontext())
    return grids


class Launches(TorchDispatchMode):
    """`names` has one entry per kernel that a GPU would run: views and allocations run none, an operation of ours runs
    as many as its launcher launches, which is run with its kernels cut out."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.names: list[str] = []
        names = [found.name for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
        modules = [importlib.import_module(name) for name in names if name.rsplit(".", 1)[1] in SPECIMENS]
        assert len(modules) == len(SPECIMENS)
        self._grids = [without_kernels(monkeypatch, module) for module in modules]
        self._launchers = {
            found._opoverload: found._init_fn
            for module in modules for found in vars(module).values() if isinstance(found, torch.library.CustomOpDef)
        }  # fmt: skip

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        launcher = self._launchers.get(function)
        if launcher is None:
            result = function(*args, **(kwargs or {}))
            if name not in NOT_LAUNCHED and not (function.is_view and _is_view(result, args[0])):
                self.names.append(name)
            return result
        before = sum(map(len, self._grids))
        with self:  # the launcher's own operations count as well
            result = launcher(*args, **(kwargs or {}))
        self.names += [name] * (sum(map(len, self._grids)) - before)
        return result


def _is_view(result: object, of: torch.Tensor) -> bool:
    """Whether an operation that may give a view has given one: `reshape` and `to` copy where there is none."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return all(torch._C._is_alias_of(part, of) for part in parts)
