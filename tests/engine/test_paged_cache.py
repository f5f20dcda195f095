"""The paged cache against rooms, through random histories; and what the system says that it takes."""

import errno
import gc
import os
import random
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from every_day import every_day
from long_runs.resident_memory import resident_bytes
from tiny_models import CONFIGS, kernel_model, tiny_model

import stand
from stand.backend import EagerBackend
from stand.forward.cache import mapped_memory, paged_cache
from stand.forward.cache.mapped_memory import SYSTEM_PAGE, AddressSpace, SharedBlock, SharedFile
from stand.forward.cache.paged_cache import PagedCache, PromptRoom, fitting_page_size, most_shown_rows
from stand.forward.cache.tree_cache import ROOM_QUANTUM, TreeCache
from stand.forward.packed_plan import StepPlan

PAGE, HEADS, SIZE, LAYERS = 16, 2, 64, 2
SEGMENT = PAGE * SIZE * 4  # bytes of a page in one head of one layer's keys
PAGE_BYTES = SEGMENT * HEADS * LAYERS * 2
LENGTHS = (0, 1, 16, 37, 70, ROOM_QUANTUM - 8)  # of prompts; rows of the last one outgrow the first room

pytestmark = pytest.mark.skipif(not mapped_memory.is_available(), reason="needs Linux")


def taken(*spaces: AddressSpace) -> int:
    return resident_bytes([(space.start, space.nbytes) for space in spaces])


def write(cache: TreeCache, lengths: list[int], counts: list[int], generator: torch.Generator) -> None:
    """One forward of random keys: counts[row] tokens behind lengths[row], in all layers."""
    offsets = np.concatenate([[0], np.cumsum(counts)])
    depths = np.concatenate([np.arange(count) for count in counts])
    plan = StepPlan(
        np.zeros(offsets[-1], dtype=np.int32), offsets, depths, np.tri(offsets[-1], dtype=bool)[:, : max(counts)],
        np.array(lengths),
    )  # fmt: skip
    cache.begin(plan)
    for layer in range(LAYERS):
        states = torch.rand(2, 1, HEADS, offsets[-1], SIZE, generator=generator)
        cache.update(states[0], states[1], layer)


def prompt_of(length: int, seed: int) -> tuple[PromptRoom, TreeCache]:
    made = PromptRoom(SharedFile(), length), TreeCache(1, length)
    for cache in made:
        if length:
            write(cache, [0], [length], torch.Generator().manual_seed(seed))
    return made


class Pair:
    """A paged cache and its twin with rooms, which are told the same."""

    def __init__(self, num_rows: int):
        self.paged, self.rooms = PagedCache(num_rows, 20, page_size=PAGE), TreeCache(num_rows, 20)
        self.lengths: list[int] = []
        self.prompts = [prompt_of(length, length) for length in LENGTHS]
        self.first_room = self.paged.room

    def enter(self, place: int, prompt: int) -> None:
        shared, plain = self.prompts[prompt]
        length = LENGTHS[prompt]
        self.paged.enter(place, shared, length)
        self.rooms.enter(place, plain, length)
        self.lengths[place : place + 1] = [length]

    def step(self, seed: int, counts: list[int], kept: list[int]) -> None:
        for cache in (self.paged, self.rooms):
            write(cache, self.lengths, counts, torch.Generator().manual_seed(seed))
            rows = np.repeat(np.arange(len(kept)), kept)
            targets = np.concatenate([np.arange(count) for count in kept]) + np.repeat(self.lengths, kept)
            sources = np.repeat([length + count for length, count in zip(self.lengths, counts, strict=True)], kept) - 1
            cache.compact(rows, sources, targets)
        self.lengths = [length + count for length, count in zip(self.lengths, kept, strict=True)]

    def leave(self, place: int) -> None:
        self.paged.leave(place)
        self.rooms.leave(place)
        last = len(self.lengths) - 1
        if place < last:
            for cache in (self.paged, self.rooms):
                cache.move(last, place, self.lengths[last])
            self.lengths[place] = self.lengths[last]
        self.lengths.pop()

    def check(self) -> None:
        for own, others in ((self.paged.keys, self.rooms.keys), (self.paged.values, self.rooms.values)):
            for mine, other in zip(own, others, strict=True):
                for row, length in enumerate(self.lengths):
                    assert torch.equal(mine[row, :, :length], other[row, :, :length])
                assert torch.isfinite(mine[:, :, :100]).all()


@pytest.mark.parametrize("seed", range(4))
def test_it_holds_what_rooms_hold(seed):
    generator, pair = random.Random(seed), Pair(4)
    pair.enter(0, 1)
    pair.enter(1, len(LENGTHS) - 1)
    for step in (60, 61):
        pair.step(step, [4, 8], [3, 5])
        pair.check()
    assert pair.paged.room > pair.first_room  # it has grown
    for step in range(60):
        act = generator.choice(("enter", "step", "step", "leave"))
        if act == "enter" and len(pair.lengths) < 4:
            pair.enter(len(pair.lengths), generator.randrange(len(LENGTHS)))
        elif act == "leave" and pair.lengths:
            pair.leave(generator.randrange(len(pair.lengths)))
        elif act == "step" and pair.lengths:
            counts = [generator.randrange(1, 9) for _ in pair.lengths]
            pair.step(step, counts, [generator.randrange(1, count + 1) for count in counts])
        pair.check()


def test_rows_share_their_prompt_and_pay_for_what_they_write():
    shared, plain = prompt_of(37, 1)  # two pages and five slots
    cache = PagedCache(3, 600, page_size=PAGE)
    blocks = [shared.block(storage) for storage in (*shared.keys, *shared.values)]
    assert taken(*blocks) == 3 * PAGE_BYTES
    cache.enter(0, shared, 37)
    cache.enter(1, shared, 37)
    everything = [*cache.spaces, *blocks]
    assert sum(float(storage[:2, :, :37].sum()) for storage in cache.keys)  # read, which takes nothing
    assert taken(*everything) == 3 * PAGE_BYTES
    write(cache, [37, 37], [3, 30], torch.Generator().manual_seed(0))
    assert taken(*everything) == (3 + 1 + 3) * PAGE_BYTES  # copies of the last page, and two more of the second row
    for mine, other in zip((*shared.keys, *shared.values), (*plain.keys, *plain.values), strict=True):
        assert torch.equal(mine[0, :, :37], other[0, :, :37]) and not mine[0, :, 37:48].any()
    cache.leave(0)
    assert taken(*everything) == (3 + 3) * PAGE_BYTES
    cache.move(1, 0, 60)  # 60 slots are four pages, two of them the prompt's
    assert taken(*everything) == (3 + 2) * PAGE_BYTES
    assert torch.equal(cache.keys[0][0, :, :37], plain.keys[0][0, :, :37])
    cache.leave(0)
    assert taken(*everything) == 3 * PAGE_BYTES
    assert not any(storage.any() for storage in (*cache.keys, *cache.values))


def test_a_prompt_that_is_gone_gives_its_memory_back():
    file = SharedFile()
    kept, gone = SharedBlock(file, 8 * SYSTEM_PAGE), SharedBlock(file, 8 * SYSTEM_PAGE)
    for block in (kept, gone):
        block.tensor((8 * SYSTEM_PAGE,), torch.uint8).fill_(1)
    assert os.fstat(file.number).st_blocks * 512 == 16 * SYSTEM_PAGE
    del block, gone
    assert os.fstat(file.number).st_blocks * 512 == 8 * SYSTEM_PAGE
    assert int(kept.tensor((8 * SYSTEM_PAGE,), torch.uint8).sum()) == 8 * SYSTEM_PAGE


def test_what_the_system_refuses_is_an_error():
    space = AddressSpace(SYSTEM_PAGE)
    with pytest.raises(OSError, match="must be mapped, got Invalid argument"):
        space.drop(5, SYSTEM_PAGE)
    with pytest.raises((OSError, OverflowError)):
        AddressSpace(1 << 60)


def test_what_the_system_refuses_leaves_nothing_to_close(monkeypatch):
    """An object whose making failed goes without a further error."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def refuse(*arguments, **settings):
        raise OSError(errno.ENFILE, "no more files")

    file = SharedFile()
    with monkeypatch.context() as refusing:
        refusing.setattr(mapped_memory.mmap, "mmap", refuse)
        with pytest.raises(OSError, match="no more files"):
            SharedBlock(file, SYSTEM_PAGE)
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(OSError, match="no more files"):
        SharedFile()
    gc.collect()
    assert unraisable == []
    monkeypatch.setattr(SharedFile, "__del__", lambda file: file.missing)  # the hook sees what goes wrong
    del file
    gc.collect()
    assert len(unraisable) == 1


def test_pages_fill_whole_pages_of_the_system():
    assert [fitting_page_size(size * 4) for size in (64, 32, 128, 96)] == [16, 32, 16, 32]
    assert [fitting_page_size(size * 2) for size in (64, 128, 256)] == [32, 16, 16]
    assert fitting_page_size(20) is None


def test_rows_that_share_prompts_are_as_many_as_mappings_hold(monkeypatch):
    assert most_shown_rows(30, 3) > 64 and most_shown_rows(10**6, 8) == 1
    monkeypatch.setattr(paged_cache.Path, "read_text", lambda path, encoding: "1000\n")
    assert most_shown_rows(2, 3) == 500 // 24


def test_limited_addresses_are_not_taken(monkeypatch):
    assert mapped_memory._addresses_are_free()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 40, 1 << 40))
    assert not mapped_memory._addresses_are_free()
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: "2\n")
    assert not mapped_memory._addresses_are_free()


def test_the_engine_takes_it_where_it_can(monkeypatch):
    backend = stand.wrap(kernel_model("qwen2")).backend
    assert backend.page_size == PAGE and backend.most_rows > 1000
    assert stand.wrap(tiny_model("qwen2")).backend.page_size == 128
    monkeypatch.setattr(mapped_memory, "is_available", lambda: False)
    rooms = EagerBackend(kernel_model("qwen2"), "a system without them")
    assert rooms.page_size is None and rooms.most_rows is None and type(rooms.key_maker()(5)) is TreeCache


@pytest.mark.parametrize("family", every_day(CONFIGS, "llama", "gemma2", "gpt_oss"))
def test_families_have_the_tokens_of_rooms(family):
    """Windows, soft-caps, sinks and other heads: mapped rooms are rooms."""
    settings = {"num_return_sequences": 4, "max_new_tokens": 40, "temperature": 0.9, "seed": 2}
    paged, rooms = (stand.wrap(tiny_model(family), drafter=stand.BlendedDrafter(budget=12)) for _ in range(2))
    assert paged.backend.page_size is not None
    rooms.backend.page_size = None
    outputs = [engine.generate([[5, 9, 11], [7, 8]], **settings, max_rows=3) for engine in (paged, rooms)]
    assert outputs[0].token_ids == outputs[1].token_ids


def test_a_child_does_not_empty_its_parents_file():
    file = SharedFile()
    block = SharedBlock(file, SYSTEM_PAGE)
    block.tensor((SYSTEM_PAGE,), torch.uint8).fill_(3)
    file.process = -1  # as in a child, whose copies of these objects go when it ends
    number, process = os.dup(file.number), file.process
    del block
    assert process == -1 and os.pread(number, 2, 0) == b"\x03\x03"
    os.close(number)
    assert paged_cache.PAGE_SIZES[0] == PAGE
