"""How many rows may be live, and who holds memory for them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from stand.row import Row
from stand.scheduling.page_allocator import PageAllocator
from stand.scheduling.request import Job


def beginning(row: Row) -> Hashable:
    """What `row` begins with: the prompt of its problem, or all that it had when it was put back."""
    return ("row", row.index) if row.num_steps else ("problem", row.problem)


def lies_beyond(row: Row, border: int | None) -> bool:
    """Whether `row` has outgrown the border of `stand.forward.long_factors`; none has where there is none."""
    return border is not None and len(row.history) > border


class Admission:
    """What the scheduler asks and tells. This one has no limits."""

    num_slots: int | None = None  # of the cache that are taken, where they are counted
    pages: PageAllocator | None = None  # by which they are counted
    most_places: int | None = None  # that a call may have, where a place takes no memory until a row is in it

    def check(self, job: Job) -> None:
        """Raises ValueError for a request whose rows could never run."""

    def allows(self, live: Sequence[Row], row: Row) -> bool:
        """Whether `row` may start beside `live`, which is not empty."""
        return True

    def fits(self, live: Sequence[Row], row: Row) -> bool:
        """Whether memory lets `row` start beside `live`, however many they are."""
        return True

    def holds(self, live: Sequence[Row]) -> bool:
        """Whether all of `live` can take another step, whatever is drafted; else the youngest must go."""
        return True

    def settle(self, num_places: int) -> None:
        """No more rows than that will be live at once, unless `unsettle` is called."""

    def is_cramped(self, row: Row) -> bool:
        """Asked where nobody is live: whether `row` could not come to its end beside what places take."""
        return False

    def unsettle(self) -> None:
        """Places are given back: nobody is live, and the number of them will be told anew."""

    def open(self, row: Row) -> Hashable:
        """What `row` begins with is going to be computed; who owns the memory, for `release`."""
        return None

    def is_shared(self, start: Hashable) -> bool:
        """Whether live rows lie in the memory of what is named `start`, so that little is won where it goes."""
        return False

    def close(self, start: Hashable) -> None:
        """No further row begins with `start`, as `beginning` names it."""

    def release(self, owner: Hashable) -> None:
        """The memory of `owner` is given back."""

    def enter(self, row: Row) -> None:
        """`row` begins with what was opened for it."""

    def take(self, live: Sequence[Row], ends: Sequence[int]) -> None:
        """The next step writes slots of each row up to these."""

    def leave(self, row: Row) -> None:
        """The keys of `row` are of no further use."""


@dataclass(frozen=True, slots=True)
class AtMost(Admission):
    """A fixed number of rows."""

    max_rows: int

    def allows(self, live: Sequence[Row], row: Row) -> bool:
        return len(live) < self.max_rows
