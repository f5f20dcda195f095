"""Triton's driver for a GPU that is not there: launches go to the PTX machine, on CPU tensors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from ptx.machine import Machine
from ptx.memory import tensor_allocations
from ptx.program import parse

MOST_SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes that one block may have


class Driver:
    """What `triton.runtime.driver.active` is asked for.

    may_collide: kernels whose blocks may write to one place that nobody reads.
    """

    def __init__(self, capability: int, *, may_collide: Collection[str] = ()) -> None:
        self.capability, self.may_collide = capability, may_collide
        self.order = range  # in which the blocks of a launch run, of their number
        self._devices = itertools.count()
        self.device, self._edit = next(self._devices), str
        self.launcher_cls = self._launcher
        self.utils = SimpleNamespace(load_binary=self._load, get_device_properties=self._properties)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.device

    @contextlib.contextmanager
    def edited(self, edit: Callable[[str], str]) -> Iterator[None]:
        """Kernels are loaded anew with their PTX changed; Triton keeps them by device, so there is another one."""
        before, self.device, self._edit = (self.device, self._edit), next(self._devices), edit
        try:
            yield
        finally:
            self.device, self._edit = before

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def _properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MOST_SHARED[self.capability], "multiprocessor_count": 4}

    def _load(self, name: str, binary: bytes, shared_bytes: int, device: int) -> tuple:
        program = parse(self._edit(binary.decode()))
        most_threads = 1024
        return name, (program, []), 0, 0, most_threads

    def _launcher(self, source, metadata) -> Callable:
        kinds = source.signature.values()

        def launch(x, y, z, stream, function, packed, launch_metadata, enter_hook, exit_hook, *given) -> None:
            program, machines = function
            if not machines:
                machines.append(Machine(program, metadata.num_warps * 32, metadata.shared))
            arguments = [value for value, kind in zip(given, kinds, strict=True) if kind != "constexpr"]
            tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
            values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
            scratch = [0] * (len(program.parameters) - len(values))  # the compiler's own; no kernel here uses it
            machines[0].launch(
                (x, y, z),
                [*values, *scratch],
                tensor_allocations(tensors),
                may_collide=program.name in self.may_collide,
                order=self.order,
            )

        return launch


@contextlib.contextmanager
def compiled_kernels(capability: int, cache, **options) -> Iterator[Driver]:
    """Kernels that were imported for Triton's compiler run on CPU tensors. cache: a folder for what is compiled.

    The PTX takes the place of the assembler's output, so the folder must not be Triton's own.
    """
    active, make_cubin, folder = triton.runtime.driver._active, CUDABackend.make_cubin, knobs.cache.dir
    driver = Driver(capability, **options)
    triton.runtime.driver.set_active(driver)
    CUDABackend.make_cubin = lambda self, ptx, *rest: ptx.encode()
    knobs.cache.dir = str(cache)
    try:
        yield driver
    finally:
        triton.runtime.driver._active = active
        CUDABackend.make_cubin = make_cubin
        knobs.cache.dir = folder
