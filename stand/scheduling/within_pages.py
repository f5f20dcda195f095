"""Rows are live while the pages of their keys fit. Where they come to need more, the youngest must go."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

from stand.forward.cache.tree_cache import DRAFT_ROOM
from stand.row import Row
from stand.scheduling.admission import Admission, beginning
from stand.scheduling.page_allocator import PageAllocator
from stand.scheduling.request import Job

ROUNDING = 1e-6  # pages
GROWTH = 512  # slots; best of 1, 64, 512 and 2,048 in a simulated run (docs/long_runs_measured.md)


class WithinPages(Admission):
    """Counts the pages of rows and prompts by a `PageAllocator`.

    What a step may need is known before anything is drafted: were it known from the drafts, those that fit would be
    other ones than the recorded laws say, and ratio rules would not be lossless.
    """

    def __init__(
        self,
        pages: PageAllocator,
        *,
        most_rows: int | None = None,
        most_places: int | None = None,
        most_slots: Callable[[int], int | None] = lambda num_rows: 0,
        is_asked_for: bool = False,
        growth: int | None = None,
        row_pages: float = 0.0,
        spare: float = 0.0,
    ):
        """most_places: where a place takes no memory by itself: of a call that begins with fewer rows.
        most_slots: slots behind the committed keys, roots excluded, that a step of so many rows takes at most; None:
        DRAFT_ROOM each.
        is_asked_for: the number of pages is the user's; a request that may come to need more is refused.
        growth: slots that every row can still grow by when another one starts, if its limit lets it; None: GROWTH.
        row_pages: what a row takes beside its keys, for recurrent states, counted in pages. spare: part of a page
        that is free beside `pages`."""
        self.pages = pages
        self._most_rows = most_rows
        self.most_places = most_places
        self._most_slots = most_slots
        self._asked_for = pages.num_pages if is_asked_for else None
        self._growth = GROWTH if growth is None else growth
        self._row_pages, self._spare = row_pages, spare
        self._row_pages_ahead = row_pages  # 0 from when the number of places is known
        self._reserved = 0  # pages that they take from then on
        self._open: dict[Hashable, Hashable] = {}  # by what rows begin with: who holds its pages
        self._num_opened = 0
        self._ends: dict[int, int] = {}  # by row: slots that it may write without a further page

    @property
    def num_slots(self) -> int:
        return self.pages.num_used * self.pages.page_size

    def check(self, job: Job) -> None:
        if self._asked_for is None:
            return
        needed = self._most_pages(len(job.prompt) - 1 + job.limit) + math.ceil(self._row_pages)
        if needed > self._asked_for:
            raise ValueError(
                f"max_cache_bytes must hold one row with its {job.limit} new tokens, {needed} pages of "
                f"{self.pages.page_size} tokens, got {self._asked_for}; raise it (of llama.cpp num_slots), or lower "
                "max_new_tokens or what is drafted"
            )

    def settle(self, num_places: int) -> None:
        beside = self._row_pages * num_places - self._spare - ROUNDING
        self._reserved, self._row_pages_ahead = max(math.ceil(beside), 0), 0.0
        if self.pages.num_pages is not None:
            self.pages.num_pages = max(self.pages.num_pages - self._reserved, 1)

    def is_cramped(self, row: Row) -> bool:
        return self._reserved > 0 and not self._is_beside([row], self._reserved)

    def unsettle(self) -> None:
        self.pages.num_pages += self._reserved
        self._reserved, self._row_pages_ahead = 0, self._row_pages

    def allows(self, live: Sequence[Row], row: Row) -> bool:
        return (self._most_rows is None or len(live) < self._most_rows) and self.fits(live, row)

    def fits(self, live: Sequence[Row], row: Row) -> bool:
        places = self._reserved + math.ceil(self._row_pages_ahead * (len(live) + 1))
        if self._row_pages and not self._is_beside([*live, row], places):
            return False  # a row that goes on alone must come to its end beside them
        grown, prompt = self.pages.count(1 + self._growth), self.pages.count(row.num_cached)
        return self._is_plenty(len(live) + 1, grown, prompt) or self._fit([*live, row], self._growth)

    def holds(self, live: Sequence[Row]) -> bool:
        """Asked before every step."""
        return self._is_plenty(len(live), 1) or self._fit(live, 0)

    def open(self, row: Row) -> Hashable:
        self._num_opened += 1
        owner = self._open[beginning(row)] = ("prompt", self._num_opened)
        if not self._ends:
            self._let_take(owner, 0, row.num_cached)
        self.pages.write(owner, 0, row.num_cached)
        return owner

    def is_shared(self, start: Hashable) -> bool:
        return self.pages.is_shared(self._open[start])

    def close(self, start: Hashable) -> None:
        self._open.pop(start, None)

    def release(self, owner: Hashable) -> None:
        self.pages.release(owner)

    def enter(self, row: Row) -> None:
        self.pages.fork(self._open[beginning(row)], row.index, row.num_cached)
        self._ends[row.index] = row.num_cached

    def take(self, live: Sequence[Row], ends: Sequence[int]) -> None:
        for row, end in zip(live, ends, strict=True):
            if end > self._ends[row.index]:
                if len(live) == 1:
                    self._let_take(row.index, row.num_cached, end)
                self.pages.write(row.index, row.num_cached, end)
                self._ends[row.index] = self.pages.page_size * self.pages.count(end)

    def leave(self, row: Row) -> None:
        self.pages.release(row.index)
        self._ends.pop(row.index, None)

    def _let_take(self, owner: Hashable, first: int, end: int) -> None:
        """Nobody else is live. A number of pages that is nobody's wish but a share of what was free gives way, up to
        the user's where there is one: what the system cannot provide then, it says itself."""
        if self.pages.num_pages is not None:
            needed = self.pages.num_used + self.pages.missing(owner, first, end)
            allowed = needed if self._asked_for is None else min(needed, self._asked_for - self._reserved)
            self.pages.num_pages = max(self.pages.num_pages, allowed)

    def _fit(self, rows: Sequence[Row], growth: int) -> bool:
        """Whether each of `rows` can take a step after `growth` further tokens, or all that it may still get."""
        if self.pages.num_pages is None:
            return True
        size, needed, slacks = self.pages.page_size, 0, []
        for row in rows:
            end = row.num_cached + 1 + min(growth, row.num_remaining)
            needed += self._missing(row, end)
            slacks.append(max(size * self.pages.count(end), self._ends.get(row.index, end)) - end)
        drafts = most_draft_pages(slacks, self._most_draft_slots(len(rows)), page_size=size)
        return needed + drafts + self._row_pages_ahead * len(rows) <= self.pages.num_free

    def _is_plenty(self, num_rows: int, grown: int, others: int = 0) -> bool:
        """At a glance: as many pages are free as `_fit` may ask for at most, where a row grows by `grown` pages, and
        `others`."""
        of_row = grown + 2  # a page that is shared or begun, and one more by its drafts
        of_drafts = self._most_draft_slots(num_rows) // self.pages.page_size
        return (of_row + self._row_pages_ahead) * num_rows + of_drafts + others <= self.pages.num_free

    def _most_pages(self, num_slots: int) -> int:
        """Of a row that writes so many slots, its drafts beside it."""
        return self.pages.count(num_slots + max(DRAFT_ROOM, self._most_draft_slots(1))) + 1

    def _is_beside(self, rows: Sequence[Row], places: int) -> bool:
        """Whether each of `rows` alone could come to its end beside what places take."""
        if self._asked_for is None:
            return True
        return max(self._most_pages(row.most_cached) for row in rows) + places <= self._asked_for

    def _most_draft_slots(self, num_rows: int) -> int:
        known = self._most_slots(num_rows)
        return DRAFT_ROOM * num_rows if known is None else known

    def _missing(self, row: Row, end: int) -> int:
        """Pages that `row`, live or not, takes until it has written `end` slots."""
        if row.index in self._ends:
            return self.pages.missing(row.index, row.num_cached, end)
        own = self.pages.count(end) - row.num_cached // self.pages.page_size
        return own if beginning(row) in self._open else own + self.pages.count(row.num_cached)


def most_draft_pages(slacks: Sequence[int], num_nodes: int, *, page_size: int) -> int:
    """Further pages that `num_nodes` nodes take at most, however rows share them; slacks: free slots of rows' pages."""
    num_pages = 0
    for slack in sorted(slacks):
        cost = min(slack, page_size - 1) + 1
        if cost > num_nodes:
            break
        num_nodes -= cost
        num_pages += 1
    return num_pages + num_nodes // page_size
