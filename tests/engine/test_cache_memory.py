"""What a cache asks of the machine: when it is refused, and what counts as free."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stand.forward.packed_plan import StepPlan
from stand.forward.tree_cache import CacheMemoryError, TreeCache, available_bytes, check_fits

CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)


@pytest.fixture
def pages(monkeypatch):
    """A machine of 3 pages of 2 GiB, two of them free."""
    sizes = {"SC_PAGE_SIZE": 2 << 30, "SC_PHYS_PAGES": 3, "SC_AVPHYS_PAGES": 2}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)


def test_a_request_for_more_than_the_machine_has_is_refused(pages):
    check_fits(6 << 30, CPU)
    with pytest.raises(CacheMemoryError, match=r"got a request for 6\.5 GiB; lower num_return_sequences"):
        check_fits(13 << 29, CPU)
    check_fits(1 << 60, META)


def test_a_gpus_whole_memory_is_the_limit(monkeypatch):
    properties = SimpleNamespace(total_memory=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    check_fits(100, CUDA)
    with pytest.raises(CacheMemoryError):
        check_fits(101, CUDA)


def test_what_torch_holds_unused_is_free_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 1000))
    assert available_bytes(CUDA) == 70
    assert available_bytes(META) == float("inf")


def test_free_pages_count_where_the_system_says_no_more(pages, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "MemTotal: 9 kB\nMemAvailable: 7 kB\n")
    assert available_bytes(CPU) == 7 * 1024
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "MemTotal: 9 kB\n")
    assert available_bytes(CPU) == 4 << 30


def test_an_unused_cache_is_empty():
    cache = TreeCache(num_rows=2, room=4)
    assert cache.get_seq_length() == 0
    cache.begin(SimpleNamespace(kv_length=3))
    assert cache.get_seq_length() == 3


def test_slots_of_a_plan_are_known_once_there_are_layers():
    cache, plan = TreeCache(num_rows=3, room=4), StepPlan.for_prompt(np.array([5, 6, 7]), 2, row=1)
    cache.begin(plan)
    assert cache.room >= 5 and cache.slots is None
    states = torch.zeros(1, 2, 3, 8)
    cache.update(states, states, 0)
    assert cache.slots is None  # of this plan: its first layers wrote without them
    cache.begin(plan)
    assert cache.slots.tolist() == [cache.room + slot for slot in (2, 3, 4)]
