"""Pages through random histories: nothing leaks, nobody writes what another one reads, content survives copies."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stand.scheduling.page_allocator import PageAllocator, PagesExhaustedError

STEPS = st.lists(st.tuples(st.sampled_from(("admit", "append", "fork", "release")), st.integers(0, 2**20)), max_size=60)


class Contents:
    """What owners wrote, once by owner and once through their pages, where a page forgets nothing."""

    def __init__(self, page_size: int, num_pages: int | None):
        self.pages = PageAllocator(page_size, num_pages)
        self.texts: dict[int, list[int]] = {}
        self.memory: dict[tuple[int, int], int] = {}  # by page and slot of it
        self.num_owners = self.num_written = 0

    def append(self, owner: int, count: int) -> None:
        text = self.texts[owner]
        copies = self.pages.write(owner, len(text), len(text) + count)
        assert len(copies) <= 1  # of the last page alone
        for source, target in copies:
            for slot in range(self.pages.page_size):
                self.memory[target, slot] = self.memory.get((source, slot), -1)
        for _ in range(count):
            page = self.pages.pages(owner)[len(text) // self.pages.page_size]
            assert [other for other in self.texts if page in self.pages.pages(other)] == [owner]
            self.num_written += 1
            self.memory[page, len(text) % self.pages.page_size] = self.num_written
            text.append(self.num_written)

    def admit(self) -> int:
        self.num_owners += 1
        self.texts[self.num_owners] = []
        return self.num_owners

    def step(self, act: str, number: int) -> None:
        owners = sorted(self.texts)
        owner = owners[number % len(owners)] if owners else None
        if act == "admit":
            self.append(self.admit(), number % 40)
        elif owner is None:
            return
        elif act == "append":
            self.append(owner, number % 23)
        elif act == "fork":
            length = number % (len(self.texts[owner]) + 1)
            twin = self.admit()
            self.pages.fork(owner, twin, length)
            self.texts[twin] = self.texts[owner][:length]
        else:
            self.pages.release(owner)
            del self.texts[owner]

    def check(self) -> None:
        size, held = self.pages.page_size, set()
        for owner, text in self.texts.items():
            pages = self.pages.pages(owner)
            assert len(pages) >= -(-len(text) // size) and len(set(pages)) == len(pages)
            assert [self.memory[pages[slot // size], slot % size] for slot in range(len(text))] == text
            held |= set(pages)
        assert self.pages.num_used == len(held) <= self.pages.most_used
        if self.pages.num_pages is not None:
            assert self.pages.num_free == self.pages.num_pages - len(held) >= 0


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from((1, 3, 16)), st.sampled_from((None, 4, 12)))
def test_random_histories(steps, page_size, num_pages):
    contents = Contents(page_size, num_pages)
    for act, number in steps:
        before = {owner: contents.pages.pages(owner) for owner in contents.texts}
        try:
            contents.step(act, number)
        except PagesExhaustedError:  # nothing was taken
            assert num_pages is not None
            assert before == {owner: contents.pages.pages(owner) for owner in before}
        contents.check()
    for owner in list(contents.texts):
        contents.pages.release(owner)
    assert contents.pages.num_used == 0


@settings(max_examples=50, deadline=None)
@given(STEPS)
def test_what_is_missing_is_what_is_taken(steps):
    contents = Contents(4, None)
    for act, number in steps:
        contents.step(act, number)
        for owner, text in contents.texts.items():
            for count in (0, 1, 9):
                expected = contents.pages.missing(owner, len(text), len(text) + count)
                twin = clone(contents.pages)
                twin.write(owner, len(text), len(text) + count)
                assert twin.num_used - contents.pages.num_used == expected


def clone(pages: PageAllocator) -> PageAllocator:
    twin = PageAllocator(pages.page_size, pages.num_pages)
    twin._users, twin._free, twin.num_used = list(pages._users), list(pages._free), pages.num_used
    twin._held = {owner: list(own) for owner, own in pages._held.items()}
    return twin


def test_the_check_sees_a_page_that_is_written_while_shared(monkeypatch):
    """The negative control: no copy on write."""
    contents = Contents(4, None)
    contents.append(contents.admit(), 6)
    contents.step("fork", 6)
    monkeypatch.setattr(PageAllocator, "missing", lambda *given: 0)
    monkeypatch.setattr(contents.pages, "_users", [1] * 9)
    with pytest.raises(AssertionError):
        contents.append(2, 1)


def test_the_last_page_alone_is_copied():
    pages = PageAllocator(4)
    pages.write("prompt", 0, 10)
    for row in (1, 2):
        pages.fork("prompt", row, 10)
    assert pages.num_used == 3
    assert pages.write(1, 10, 11) == [(2, 3)] and pages.pages(1) == (0, 1, 3)
    pages.release("prompt")
    assert pages.write(2, 10, 15) == [] and pages.pages(2) == (0, 1, 2, 4)
    pages.release(1)
    pages.release(2)
    assert pages.num_used == 0 and pages.most_used == 5


def test_pages_are_shared_until_they_are_copied_or_given_back():
    pages = PageAllocator(4)
    pages.write("prompt", 0, 6)
    assert not pages.is_shared("prompt") and not pages.is_shared("nobody")
    pages.fork("prompt", "row", 6)
    pages.write("row", 6, 7)
    assert pages.is_shared("prompt") and pages.is_shared("row")  # the first page; the last one was copied
    pages.release("row")
    assert not pages.is_shared("prompt")


def test_what_cannot_be_is_refused():
    pages = PageAllocator(4, 2)
    pages.write("a", 0, 5)
    with pytest.raises(PagesExhaustedError, match="1 pages must be free, got 0"):
        pages.write("b", 0, 1)
    for source, target, length in (("a", "b", 9), ("a", "a", 2), ("c", "b", 1)):
        with pytest.raises(ValueError, match="a fork needs .*, got .*; release"):
            pages.fork(source, target, length)
    with pytest.raises(ValueError, match="must be at least 1, got 0 and None; None"):
        PageAllocator(0)


@pytest.mark.parametrize("sizes", [(0, None), (4, 0)])
def test_pages_of_nothing_are_refused(sizes):
    with pytest.raises(ValueError, match="page_size and num_pages must be at least 1"):
        PageAllocator(*sizes)
    assert PageAllocator(1, 1).num_free == 1
