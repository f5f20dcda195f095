"""Who touched a byte last, and whether a barrier lies between two threads that touch the same one.

A block's clock counts its barriers: in the high bits the block's number, in the low ones the barriers of one warp. Two
accesses of different threads, one of them a write, are ordered by a barrier of both in between; in different blocks by
a release after the first and an acquire before the second. Everything else is a race.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

WARP = 32
NOBODY, MANY = 0, -1  # threads of a launch are numbered from 1 on
WARP_BITS, TIME_BITS = 20, 24  # of a clock
WIDEST = 16  # bytes that one thread touches at once, at most


class PtxError(RuntimeError):
    """What a GPU would fail at, or leave to chance."""


@dataclass
class Clock:
    """The order of accesses in one block of `num_threads` threads; `block` is its number in the launch.

    may_collide: blocks may write to one place if no thread reads it in this launch.
    """

    block: int
    num_threads: int
    released: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)  # (block, thread, time) per address
    may_collide: bool = False
    time: int = field(init=False)
    warp_times: np.ndarray = field(init=False)
    acquired: dict[int, tuple[int, int]] = field(default_factory=dict)  # (thread, time) of a block's last release
    acquired_at: tuple[int, int] = (0, 0)  # (thread, time) of the last acquire here

    def __post_init__(self) -> None:
        self.time = self.block << TIME_BITS
        self.warp_times = np.zeros(self.num_threads // WARP, dtype=np.int64)

    def numbers(self, threads: np.ndarray) -> np.ndarray:
        """int64 [n]: the threads' numbers in the launch."""
        return self.block * self.num_threads + threads + 1

    def now(self, threads: np.ndarray) -> np.ndarray:
        """int64 [n]: the clock of each thread."""
        return (np.int64(self.time) << WARP_BITS) | self.warp_times[threads // WARP]

    def barrier(self) -> None:
        self.time += 1

    def warp_barrier(self, warps: np.ndarray) -> None:
        self.warp_times[warps] += 1

    def release_and_acquire(self, thread: int, address: int) -> None:
        """An atomic operation of one thread that acquires and releases."""
        chain = self.released.setdefault(address, [])
        for block, releaser, time in chain:
            self.acquired[block] = (releaser, time)
        self.acquired_at = (thread, self.time)
        chain.append((self.block, thread, self.time))


class Ledger:
    """Last writer and reader of every byte of an allocation at `start`, in one launch.

    Bytes that were always touched together share one entry: accesses are aligned, so entries of the narrowest access so
    far, 16 bytes at most, part the bytes of all. `is_in_flight`: an asynchronous copy has not brought them yet.
    `is_unfenced`: the asynchronous proxy (wgmma) may not read them.
    """

    NUMBERS, MARKS = ("writer", "written", "reader", "read"), ("is_in_flight", "is_unfenced")

    def __init__(self, num_bytes: int, start: int = 0) -> None:
        self.num_bytes, self.widest = num_bytes, start & -start & 15 or WIDEST
        self.bytes_per_entry = 0  # nothing was touched yet

    def places(self, first: np.ndarray, num_bytes: int) -> np.ndarray:
        """int64 [n, x]: the entries of bytes `first` [n] and those behind, so many in all."""
        width = min(num_bytes, self.widest)
        if not 0 < self.bytes_per_entry <= width:
            self._part(width)
        places = (first // self.bytes_per_entry)[:, None]
        count = num_bytes // self.bytes_per_entry
        return places if count == 1 else places + np.arange(count)

    def _part(self, width: int) -> None:
        count = -(-self.num_bytes // width)
        for name in (*self.NUMBERS, *self.MARKS):
            if self.bytes_per_entry:
                array = np.repeat(getattr(self, name), self.bytes_per_entry // width)[:count]
            else:  # zeros cost no memory until they are touched
                array = np.zeros(count, dtype=np.int64 if name in self.NUMBERS else bool)
            setattr(self, name, array)
        self.bytes_per_entry = width

    def note_read(self, places: np.ndarray, threads: np.ndarray, clock: Clock) -> None:
        """places: int64 [n, x] entries that threads [n] read."""
        self._check(self.writer[places], self.written[places], threads, clock, "reads what thread {} wrote")
        me, now = clock.numbers(threads)[:, None], clock.now(threads)[:, None]
        readers = self.reader[places]
        is_shared = (readers != NOBODY) & (readers != me)
        is_shared &= self.read[places] >> WARP_BITS == clock.time
        self.reader[places] = np.where(is_shared, MANY, me)
        self.read[places] = now
        is_lost = (self.reader[places] != me) & ~is_shared  # other lanes of this instruction read the same
        if is_lost.any():
            self.reader[places[is_lost]] = MANY

    def note_write(self, places: np.ndarray, threads: np.ndarray, clock: Clock) -> None:
        """places: int64 [n, x] entries that threads [n] write."""
        writers, times = self.writer[places], self.written[places]
        if clock.may_collide:
            writers = np.where(times >> (WARP_BITS + TIME_BITS) == clock.block, writers, NOBODY)
        self._check(writers, times, threads, clock, "writes what thread {} wrote")
        self._check(self.reader[places], self.read[places], threads, clock, "writes what thread {} reads")
        self.writer[places] = clock.numbers(threads)[:, None]
        self.written[places] = clock.now(threads)[:, None]

    @staticmethod
    def _check(others: np.ndarray, times: np.ndarray, threads: np.ndarray, clock: Clock, what: str) -> None:
        me = clock.numbers(threads)[:, None]
        suspects = (others != NOBODY) & (others != me)
        if not suspects.any():
            return
        blocks = times >> (WARP_BITS + TIME_BITS)
        is_same_warp = (others != MANY) & ((others - 1) // WARP == (me - 1) // WARP)
        now = clock.now(threads)[:, None]
        is_ordered = (times >> WARP_BITS < clock.time) | (is_same_warp & (times < now))
        is_foreign = suspects & (blocks != clock.block)
        for block in np.unique(blocks[is_foreign]) if is_foreign.any() else ():
            is_ordered = np.where(blocks == block, _is_acquired(int(block), others, times, threads, clock), is_ordered)
        races = suspects & ~is_ordered
        if races.any():
            row, column = np.argwhere(races)[0]
            other = "of many" if others[row, column] == MANY else f"{(others[row, column] - 1) % clock.num_threads}"
            where = "" if blocks[row, column] == clock.block else f" of block {blocks[row, column]}"
            raise PtxError(
                f"race: thread {threads[row]} of block {clock.block} {what.format(other + where)}, "
                "with no barrier in between"
            )


def _is_acquired(block: int, others: np.ndarray, times: np.ndarray, threads: np.ndarray, clock: Clock) -> np.ndarray:
    """Whether accesses of another block lie before a release of its that this block's threads have acquired."""
    if block not in clock.acquired:
        return np.zeros_like(others, dtype=bool)
    releaser, released = clock.acquired[block]
    acquirer, acquired = clock.acquired_at
    is_before = ((others - 1) % clock.num_threads == releaser) | (times >> WARP_BITS < released)
    is_after = (threads == acquirer) | (acquired < clock.time)
    return is_before & is_after[:, None]
