"""Which pages of a pool belong to which row of a captured step, as numbers that travel in the step's packet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import numpy as np

from stand.forward.cache.tree_cache import DRAFT_ROOM, TreeCache
from stand.gpu.device_cache import DeviceCache
from stand.gpu.tuning.attention_tiles import PAGE_SIZE
from stand.row import Row
from stand.scheduling.page_allocator import PageAllocator
from stand.step_compiled import outgrown

FIRST_ROOM = 65536  # new tokens per row whose pages a table has columns for from the start; it is widened for more
PROMPTS_AHEAD = 2  # that a pool holds beside the rows: of the request that goes on, and of the next one


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What a call takes when it begins, of pages of `page_size` slots: what its rows can come to, or what it may."""

    page_size: int
    width: int  # of the longest row
    num_pages: int
    most_pages: int  # that the call may take

    @classmethod
    def of(cls, rows: Sequence[Row], num_places: int, pages: PageAllocator | None) -> PoolSize:
        """For a call that begins with `rows`; pages: says whose page is whose."""
        page_size = PAGE_SIZE if pages is None else pages.page_size
        most = sys.maxsize if pages is None or pages.num_pages is None else pages.num_pages
        slots = max(row.num_cached + min(row.num_remaining, FIRST_ROOM) for row in rows) + DRAFT_ROOM
        width = -(-slots // page_size)
        return cls(page_size, width, min((num_places + PROMPTS_AHEAD) * width, most), most)

    def is_met_by(self, cache: DeviceCache) -> bool:
        """Whether this pool is large enough for the call, and no larger than the call may take."""
        return cache.page_size == self.page_size and self.num_pages <= cache.num_pages <= self.most_pages


class PageTable:
    """`numbers` [R, T] int32: slot s of the row in place r lies in page numbers[r, s // S] of `cache`; `ends` [R]
    int64: slots that the row may write.

    A `PageAllocator` says whose page is whose, and what it says is followed here: numbers change where a row has
    outgrown its pages, and a page that it shared until then is copied. Where nobody else drives an allocator (`pages`
    is None), the table has one of its own, without a limit, in which rows share nothing. Recurrent states have no
    pages: those of place r are row r of the cache's.
    """

    def __init__(self, cache: DeviceCache, *, num_places: int, width: int, pages: PageAllocator | None = None):
        """width: T, pages of the longest row; where more comes to be needed, pool and table grow."""
        self.cache = cache
        self.page_size, self.spare_slot = cache.page_size, cache.spare_slot
        self.numbers = np.zeros((num_places, width), dtype=np.int32)
        self.ends = np.zeros(num_places, dtype=np.int64)
        self._is_own = pages is None
        self._pages = PageAllocator(cache.page_size) if pages is None else pages
        self._written: WeakSet[TreeCache] = WeakSet()  # prompts whose keys are in the pool

    @property
    def room(self) -> int:
        """The most slots of a row."""
        return self.numbers.shape[1] * self.page_size

    def enter(
        self,
        place: int,
        row: Row,
        keys: TreeCache | None,
        *,
        source: int = 0,
        before_moving: Callable[[], None] = lambda: None,
    ) -> None:
        """`row` begins with the first keys of row `source` of `keys`, which are written where no row before it has
        brought them; None: with what its pages hold.

        before_moving: called before the pool or `numbers` get other addresses, because they grow."""
        if self._is_own:
            self._pages.write(row.index, 0, row.num_cached)
        numbers = self._numbers_of(row, before_moving)
        if keys is not None and (self._is_own or keys not in self._written):
            self.cache.write(numbers, keys, row.num_cached, source=source)
            self._written.add(keys)
        if keys is not None:
            self.cache.recurrent.enter(place, keys.recurrent, source=source)
        self.numbers[place, : len(numbers)] = numbers
        self.ends[place] = row.num_cached

    def leave(self, row: Row) -> None:
        """Its pages are of no further use."""
        if self._is_own:
            self._pages.release(row.index)

    def move(self, source: int, target: int) -> None:
        """Place `target` has what place `source` had."""
        self.numbers[target], self.ends[target] = self.numbers[source], self.ends[source]
        self.cache.recurrent.move(source, target)

    def reorder(self, places: Sequence[int]) -> None:
        """Place i has what place places[i] had."""
        self.numbers, self.ends = self.numbers[places], self.ends[places]
        if self.cache.recurrent.layers:
            self.cache.recurrent.fan_out(places)

    def extend(
        self,
        rows: Sequence[Row],
        lengths: np.ndarray,
        offsets: np.ndarray,
        places: np.ndarray,
        *,
        before_moving: Callable[[], None] = lambda: None,
    ) -> None:
        """Follow what the allocator gave `rows`, in these places, for their coming nodes [offsets[i], offsets[i + 1]).

        lengths, places [b] int64, offsets [b + 1] int32; before_moving: as in `enter`."""
        changes, copies = [], []
        for packed in outgrown(lengths, offsets, places, self.ends):
            row, place, length = rows[packed], places[packed], int(lengths[packed])
            if self._is_own:
                self._pages.write(row.index, length, length + int(offsets[packed + 1] - offsets[packed]))
            numbers, first = self._numbers_of(row, before_moving), length // self.page_size
            known = self.numbers[place, first : self._pages.count(int(self.ends[place]))].tolist()
            copies += [pair for pair in zip(known, numbers[first:], strict=False) if pair[0] != pair[1]]
            changes.append((place, first, numbers))
        if copies:
            self.cache.copy(*zip(*copies, strict=True))
        for place, first, numbers in changes:  # now that nothing can fail any more
            self.numbers[place, first : len(numbers)] = numbers[first:]
            self.ends[place] = len(numbers) * self.page_size

    def _numbers_of(self, row: Row, before_moving: Callable[[], None]) -> tuple[int, ...]:
        """The row's pages; the pool has them, and the table has columns for them."""
        numbers = self._pages.pages(row.index)
        if self._pages.most_used > self.cache.num_pages:
            before_moving()
            most = self._pages.num_pages or self._pages.most_used * 2
            self.cache.grow(max(self._pages.most_used, min(2 * self.cache.num_pages, most)))
            self.spare_slot = self.cache.spare_slot
        if len(numbers) > self.numbers.shape[1]:
            before_moving()
            wider = np.zeros((len(self.numbers), 2 * len(numbers)), dtype=np.int32)
            wider[:, : self.numbers.shape[1]] = self.numbers
            self.numbers = wider
        return numbers
