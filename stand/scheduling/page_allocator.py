"""Who holds which page of the cache: numbers alone, no memory."""

from __future__ import annotations

from collections.abc import Hashable


class PagesExhaustedError(MemoryError):
    """More pages were asked for than are free; nothing was taken."""


class PageAllocator:
    """Hands out pages of `page_size` slots. Slot s of an owner lies in its page number s // page_size.

    Owners share pages from their first slot on (`fork`). What is shared is never written: `write` puts a copy in its
    place. Since an owner writes behind what it shares, that is one page at most, the last one.
    """

    def __init__(self, page_size: int, num_pages: int | None = None):
        """num_pages: None for as many as are asked for."""
        if page_size < 1 or num_pages is not None and num_pages < 1:
            raise ValueError(
                f"page_size and num_pages must be at least 1, got {page_size} and {num_pages}; None is no limit"
            )
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_used = 0  # pages
        self.most_used = 0  # at once, so far: their numbers are below this
        self._users: list[int] = []  # by page: owners that hold it
        self._free: list[int] = []  # pages that were given back
        self._held: dict[Hashable, list[int]] = {}  # by owner, in the order of its slots

    @property
    def num_free(self) -> float:
        return float("inf") if self.num_pages is None else self.num_pages - self.num_used

    def pages(self, owner: Hashable) -> tuple[int, ...]:
        """Of its slots in order; none where it holds nothing."""
        return tuple(self._held.get(owner, ()))

    def count(self, num_slots: int) -> int:
        """Pages that hold so many slots."""
        return -(-num_slots // self.page_size)

    def missing(self, owner: Hashable, first: int, end: int) -> int:
        """Pages that `write` would take."""
        held = self._held.get(owner, ())
        written = held[first // self.page_size : self.count(end)]
        return max(self.count(end) - len(held), 0) + sum(self._users[page] > 1 for page in written)

    def write(self, owner: Hashable, first: int, end: int) -> list[tuple[int, int]]:
        """`owner` is going to write its slots [first, end): its own pages from now on.

        (page, copy of it to be made before that) for every page that it shared. Raises PagesExhaustedError.
        """
        needed = self.missing(owner, first, end)
        if needed > self.num_free:
            raise PagesExhaustedError(f"{needed} pages must be free, got {self.num_free}; put a row back first")
        held, copies = self._held.setdefault(owner, []), []
        for place in range(first // self.page_size, min(self.count(end), len(held))):
            page = held[place]
            if self._users[page] > 1:
                self._users[page] -= 1
                held[place] = self._take()
                copies.append((page, held[place]))
        held.extend(self._take() for _ in range(self.count(end) - len(held)))
        self.most_used = max(self.most_used, self.num_used)
        return copies

    def is_shared(self, owner: Hashable) -> bool:
        """Whether any other owner holds one of its pages."""
        return any(self._users[page] > 1 for page in self._held.get(owner, ()))

    def fork(self, source: Hashable, target: Hashable, num_slots: int) -> None:
        """`target`, which holds nothing, begins with the first `num_slots` slots of `source`."""
        shared = self._held.get(source, [])[: self.count(num_slots)]
        if len(shared) < self.count(num_slots) or target in self._held:
            raise ValueError(
                f"a fork needs {num_slots} slots of its source and a target without pages, got {len(shared)} pages and "
                f"{len(self.pages(target))}; release the target first"
            )
        for page in shared:
            self._users[page] += 1
        self._held[target] = list(shared)

    def release(self, owner: Hashable) -> None:
        """It gives back what it holds, if anything."""
        for page in self._held.pop(owner, ()):
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)
                self.num_used -= 1

    def _take(self) -> int:
        if not self._free:
            self._users.append(0)
            self._free.append(len(self._users) - 1)
        page = self._free.pop()
        self._users[page] = 1
        self.num_used += 1
        return page
