"""Registers of all threads of a block, and operands as arrays that stay where they are."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

import numpy as np

from ptx.arithmetic import DTYPES
from ptx.memory import SHARED_START
from ptx.program import Program

POISON = 0x5A  # of what was never written


class Registers:
    """Arrays [num_threads] by name; values that all threads share are arrays [1]."""

    def __init__(self, program: Program, num_threads: int) -> None:
        self.num_threads = num_threads
        self._arrays: dict[str, np.ndarray] = {}
        self._kinds: list[np.ndarray] = []  # all registers of a kind are one array
        for prefix, (kind, count) in program.registers.items():
            names = [f"{prefix}{number}" for number in range(count)] or [prefix]
            self._kinds.append(np.zeros((len(names), num_threads), dtype=DTYPES[kind]))
            self._arrays |= zip(names, self._kinds[-1], strict=True)
        self._shared = {name: np.zeros(1, dtype=np.uint32) for name in _SPECIAL}
        self._shared |= {name: np.zeros(1, dtype=DTYPES[kind]) for name, kind in program.parameters.items()}
        self._arrays["%tid.x"] = np.arange(num_threads, dtype=np.uint32)
        self._arrays["%laneid"] = np.arange(num_threads, dtype=np.uint32) % 32
        self._shared["%ntid.x"][:] = num_threads

    def begin(self, block: tuple[int, int, int], grid: tuple[int, int, int], arguments: Mapping[str, object]) -> None:
        """Poison all registers and set what a block is given."""
        for registers in self._kinds:
            registers.view(np.uint8)[:] = POISON if registers.dtype != np.bool_ else 0
        for axis, at, size in zip("xyz", block, grid, strict=True):
            self._shared[f"%ctaid.{axis}"][:], self._shared[f"%nctaid.{axis}"][:] = at, size
        for name, value in arguments.items():
            array = self._shared[name]
            array[:] = value if array.dtype.kind == "f" else _wrapped(value, array.dtype)

    def source(self, operand: str, kind: str) -> np.ndarray | np.generic:
        """What an instruction reads: an array that shows later values too, or a number."""
        array = self._shared.get(operand, self._arrays.get(operand))
        if array is None:
            return constant(operand, kind)
        dtype = np.dtype(DTYPES[kind])
        if array.dtype == dtype:
            return array
        if array.dtype == np.bool_ or dtype == np.bool_:
            raise ValueError(f"{operand} is of type {array.dtype}, got an instruction on {kind}")
        step = array.dtype.itemsize // dtype.itemsize if not kind.endswith("x2") else 1
        return array.view(dtype)[::step]

    def array(self, name: str) -> np.ndarray:
        """The register itself, of unsigned integers or bool."""
        return self._arrays[name]

    def target(self, operand: str, kind: str) -> np.ndarray:
        """Where a result of this kind goes; raises ValueError where it would fill a part of a register."""
        array, dtype = self._arrays[operand], np.dtype(DTYPES[kind])
        if array.dtype != dtype and (kind.endswith("x2") or array.dtype.itemsize == dtype.itemsize):
            return array.view(dtype)
        if array.dtype != dtype:
            raise ValueError(f"{operand} is of type {array.dtype}, got a result in {kind}")
        return array


_SPECIAL = [f"%{name}.{axis}" for name in ("ctaid", "nctaid") for axis in "xyz"] + ["%ntid.x"]


def _wrapped(value: object, dtype: np.dtype) -> np.generic:
    return dtype.type(int(value) & ((1 << 8 * dtype.itemsize) - 1))


def constant(text: str, kind: str) -> np.generic:
    """An immediate operand: an integer, 0fXXXXXXXX or 0dXXXXXXXXXXXXXXXX, or the begin of shared memory."""
    dtype = np.dtype(DTYPES[kind])
    if text.startswith(("0f", "0d")):
        code, size = (">f", 4) if text[1] == "f" else (">d", 8)
        raw = bytes.fromhex(text[2:])
        number = struct.unpack(code, raw)[0]
        return dtype.type(number) if dtype.kind == "f" else _wrapped(int.from_bytes(raw, "big"), dtype)
    if dtype == np.bool_:
        return np.bool_(int(text, 0) != 0)
    if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
        return _integer(int(text.rstrip("U"), 0), dtype)
    if text == "global_smem":
        return _integer(SHARED_START, dtype)
    raise ValueError(f"not an operand: {text}")


def _integer(value: int, dtype: np.dtype) -> np.generic:
    if dtype.kind == "f":
        return dtype.type(value)
    unsigned = np.dtype(f"u{dtype.itemsize}").type(value & ((1 << 8 * dtype.itemsize) - 1))
    return unsigned.view(dtype)
