"""The memory that threads see: tensors of a launch, and the shared memory of a block."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from ptx.ledger import Clock, Ledger, PtxError

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # by bytes
SHARED_START = 1024  # address of shared memory: aligned as swizzles need it, and not 0
POISON = 0xA5  # of what was never written


class Allocation:
    """Bytes from address `start` on."""

    def __init__(self, start: int, content: np.ndarray, *, is_shared: bool = False) -> None:
        self.start, self.content = start, content
        self.views = {size: content[: len(content) // size * size].view(kind) for size, kind in UNSIGNED.items()}
        self.ledger = Ledger(len(content), start)
        self.is_shared = is_shared

    def places(self, addresses: np.ndarray, num_bytes: int) -> np.ndarray:
        """int64 [n, x]: the ledger's entries of so many bytes at each address [n]."""
        return self.ledger.places(addresses.astype(np.int64) - self.start, num_bytes)

    def load(self, addresses: np.ndarray, size: int, count: int) -> list[np.ndarray]:
        first = (addresses.astype(np.int64) - self.start) // size
        return [self.views[size][first + number] for number in range(count)]

    def store(self, addresses: np.ndarray, values: Sequence[np.ndarray], size: int) -> None:
        first = (addresses.astype(np.int64) - self.start) // size
        for number, value in enumerate(values):
            self.views[size][first + number] = value

    def check_arrived(self, places: np.ndarray) -> None:
        if self.is_shared and self.ledger.is_in_flight[places].any():
            raise PtxError("memory is touched while an asynchronous copy to it is under way")

    def check_fenced(self, addresses: np.ndarray, num_bytes: int) -> None:
        places = self.places(addresses, num_bytes)
        if self.ledger.is_unfenced[places].any():
            raise PtxError("wgmma reads shared memory that was written without a fence of the asynchronous proxy")

    def fence(self, threads: np.ndarray, clock: Clock) -> None:
        """What these threads have written may be read by the asynchronous proxy from now on."""
        if self.ledger.bytes_per_entry:
            self.ledger.is_unfenced &= ~np.isin(self.ledger.writer, clock.numbers(threads))


class Space:
    """Allocations by address."""

    def __init__(self, allocations: Sequence[Allocation]) -> None:
        self.allocations = sorted(allocations, key=lambda one: one.start)
        self.starts = np.array([one.start for one in self.allocations], dtype=np.int64)

    def load(self, addresses: np.ndarray, threads: np.ndarray, size: int, count: int, clock: Clock) -> list[np.ndarray]:
        """`count` neighbours of `size` bytes for each thread [n] at its address [n]."""
        results = [np.zeros(len(threads), dtype=UNSIGNED[size]) for _ in range(count)]
        for allocation, lanes in self._split(addresses, size * count):
            places = allocation.places(addresses[lanes], size * count)
            allocation.check_arrived(places)
            allocation.ledger.note_read(places, threads[lanes], clock)
            for result, values in zip(results, allocation.load(addresses[lanes], size, count), strict=True):
                result[lanes] = values
        return results

    def store(
        self, addresses: np.ndarray, threads: np.ndarray, values: Sequence[np.ndarray], size: int, clock: Clock
    ) -> None:
        """Write one value [n] or more side by side. Lanes that write one byte differently are a race."""
        for allocation, lanes in self._split(addresses, size * len(values)):
            chosen = [value[lanes] for value in values]
            self.note_write(allocation, addresses[lanes], threads[lanes], size * len(values), clock)
            allocation.store(addresses[lanes], chosen, size)
            kept = allocation.load(addresses[lanes], size, len(values))
            if any((mine != now).any() for mine, now in zip(chosen, kept, strict=True)):
                raise PtxError("race: two threads write different values to one place in one instruction")

    def add(self, address: np.ndarray, amount: np.ndarray, size: int) -> np.generic:
        """Atomically, for one thread; returns what was there before."""
        ((allocation, _),) = self._split(address, size)
        (before,) = allocation.load(address, size, 1)
        allocation.store(address, [before + amount.view(before.dtype)], size)
        return before[0]

    def note_write(
        self, allocation: Allocation, addresses: np.ndarray, threads: np.ndarray, num_bytes: int, clock: Clock
    ) -> np.ndarray:
        places = allocation.places(addresses, num_bytes)
        allocation.check_arrived(places)
        allocation.ledger.note_write(places, threads, clock)
        if allocation.is_shared:
            allocation.ledger.is_unfenced[places] = True
        return places

    def _split(self, addresses: np.ndarray, num_bytes: int):
        """(allocation, lanes) for every allocation that is touched. Raises PtxError beyond all, and if misaligned."""
        if (strays := addresses[addresses % np.uint64(num_bytes) != 0]).size:
            raise PtxError(f"addresses must be multiples of {num_bytes}, got {strays[0]}")
        found = np.searchsorted(self.starts, addresses.astype(np.int64), side="right") - 1
        is_one = len(found) > 0 and (found == found[0]).all()
        for number in found[:1] if is_one else np.unique(found):
            allocation = self.allocations[number]
            lanes = slice(None) if is_one else np.flatnonzero(found == number)
            ends = addresses[lanes].astype(np.int64) - allocation.start + num_bytes
            if number < 0 or (ends > len(allocation.content)).any():
                raise PtxError(
                    f"{num_bytes} bytes are touched at {int(ends.max()) - num_bytes} of {len(allocation.content)} "
                    "bytes of the tensor before"
                )
            yield allocation, lanes


def tensor_allocations(tensors) -> list[Allocation]:
    """One per storage of the tensors (CPU)."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return [
        Allocation(start, np.frombuffer((ctypes.c_uint8 * size).from_address(start), dtype=np.uint8))
        for start, size in storages.items() if size
    ]  # fmt: skip


def shared_memory(num_bytes: int) -> Allocation:
    """Of a block, full of what nobody wrote."""
    content = np.full(max(num_bytes, 16) + 16, POISON, dtype=np.uint8)
    return Allocation(SHARED_START, content, is_shared=True)


class CopyGroups:
    """Asynchronous copies to shared memory (cp.async). They arrive when they are waited for, as late as is allowed."""

    def __init__(self) -> None:
        self.groups: list[list[tuple]] = [[]]

    def add(self, copy: tuple) -> None:
        self.groups[-1].append(copy)

    def commit(self) -> None:
        self.groups.append([])

    def take(self, most_left: int) -> list[tuple]:
        """Copies of all committed groups but the last `most_left`."""
        committed = self.groups[:-1]
        ready = committed[: max(len(committed) - most_left, 0)]
        self.groups = [*committed[len(ready) :], self.groups[-1]]
        return [copy for group in ready for copy in group]
