"""What a cache asks of the machine: when it is refused, and what counts as free."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from stand.forward.cache import memory_limits, system_memory, tree_cache
from stand.forward.cache.tree_cache import DRAFT_ROOM, CacheMemoryError, TreeCache, available_bytes, check_fits
from stand.forward.packed_plan import StepPlan
from stand.scheduling import free_memory
from stand.scheduling.memory import WithinMemory

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
    monkeypatch.setattr(tree_cache, "within_limits", lambda free: free)
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "MemTotal: 9 kB\nMemAvailable: 7 kB\n")
    assert available_bytes(CPU) == 7 * 1024
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "MemTotal: 9 kB\n")
    assert available_bytes(CPU) == 4 << 30


VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               20011.
Pages active:                            301234.
Pages inactive:                          290005.
Pages speculative:                         1007.
Pages throttled:                              0.
Pages wired down:                        123456.
Pages purgeable:                           4567.
"Translation faults":                 123456789.
Pages copy-on-write:                    7654321.
File-backed pages:                        98765.
Swapins:                                      0.
"""


@pytest.fixture
def mac(pages, monkeypatch, tmp_path):
    """macOS with 3 pages of 1 GiB: no /proc, no name for free pages. It makes a `vm_stat` that prints these lines."""

    def sysconf(name: str) -> int:
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return {"SC_PAGE_SIZE": 1 << 30, "SC_PHYS_PAGES": 3}[name]

    def print_these(lines: str, status: int = 0) -> None:
        (tmp_path / "printed").write_text(lines)
        (tmp_path / "vm_stat").write_text(f"#!/bin/sh\ncat {tmp_path}/printed\nexit {status}\n")
        (tmp_path / "vm_stat").chmod(0o755)

    def no_file(self: Path, **_: object) -> str:
        raise FileNotFoundError(str(self))

    monkeypatch.setattr(os, "sysconf", sysconf)
    monkeypatch.setattr(Path, "read_text", no_file)
    monkeypatch.setattr(system_memory, "VM_STAT", str(tmp_path / "vm_stat"))
    return print_these


def test_on_macos_free_inactive_and_speculative_pages_count(mac):
    mac(VM_STAT)
    assert available_bytes(CPU) == (20011 + 290005 + 1007) * 16384
    check_fits(3 << 30, CPU)
    with pytest.raises(CacheMemoryError):
        check_fits((3 << 30) + 1, CPU)


def test_a_report_without_some_of_its_lines_still_counts(mac):
    mac("".join(line for line in VM_STAT.splitlines(keepends=True) if "speculative" not in line))
    assert available_bytes(CPU) == (20011 + 290005) * 16384


@pytest.mark.parametrize("printed", ["", "Pages free: 20011.\n", VM_STAT.partition("\n")[0], "page size of none"])
def test_half_of_the_memory_counts_where_macos_does_not_tell(mac, printed):
    assert available_bytes(CPU) == 3 << 29  # there is no such program
    mac(printed)
    assert available_bytes(CPU) == 3 << 29
    mac(VM_STAT, status=1)
    assert available_bytes(CPU) == 3 << 29


def groups(folder: Path, monkeypatch, lines: str) -> None:
    """A process in these control groups, memory's of version 1 below v1 and those of version 2 below v2."""
    (folder / "groups").write_text(lines)
    monkeypatch.setattr(memory_limits, "GROUPS_OF_PROCESS", folder / "groups")
    mounts = {version: (folder / f"v{version}", *files) for version, (_, *files) in memory_limits.MOUNTS.items()}
    monkeypatch.setattr(memory_limits, "MOUNTS", mounts)


def limit(group: Path, version: int, most: object, used: int, idle: int) -> None:
    """Its limit, what its processes have, and idle caches of files among that."""
    group.mkdir(parents=True, exist_ok=True)
    _, limit, usage, caches = memory_limits.MOUNTS[version]
    (group / limit).write_text(f"{most}\n")
    (group / usage).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"active_file 1\n{caches} {idle}\n")


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    """It is asked of the group, of those above it, and of the mount alone where the name is of another namespace."""
    groups(tmp_path, monkeypatch, "0::/outside/pod/one\n")
    assert memory_limits.within_limits(9.5) == 9.5
    limit(tmp_path / "v2", 2, 1000, 700, 50)
    assert available_bytes(CPU) == 350 and memory_limits.within_limits(349) == 349
    limit(tmp_path / "v2/outside", 2, "max", 600, 0)
    assert available_bytes(CPU) == 350
    limit(tmp_path / "v2/outside/pod", 2, 800, 600, 40)
    assert available_bytes(CPU) == 240
    limit(tmp_path / "v2/outside/pod/one", 2, 500, 520, 0)
    assert available_bytes(CPU) == 0


def test_limits_of_the_first_version_count(monkeypatch, tmp_path):
    groups(tmp_path, monkeypatch, "9:name=systemd:/\n8:cpu,memory:/docker/one\n1:cpuset:/a\n0::/\n")
    limit(tmp_path / "v1", 1, 9223372036854771712, 700, 50)
    assert memory_limits.within_limits(1e15) == 1e15
    limit(tmp_path / "v1/docker/one", 1, 900, 700, 50)
    limit(tmp_path / "v1/a", 1, 9, 0, 0)
    assert available_bytes(CPU) == 250


def test_a_group_of_any_name_that_tells_its_limit_alone_counts(monkeypatch, tmp_path):
    """Names are bytes; what a group does not tell of its caches is no reason to pass its limit over."""
    groups(tmp_path, monkeypatch, "0::/b\u00fcro\n")
    limit(tmp_path / "v2/b\u00fcro", 2, 900, 700, 50)
    assert available_bytes(CPU) == 250
    (tmp_path / "v2/b\u00fcro/memory.stat").unlink()
    assert available_bytes(CPU) == 200


def test_an_unused_cache_is_empty():
    cache = TreeCache(num_rows=2, room=4)
    assert cache.get_seq_length() == 0
    cache.begin(SimpleNamespace(kv_length=3))
    assert cache.get_seq_length() == 3


def test_states_of_rows_are_part_of_a_caches_size():
    cache = TreeCache(num_rows=3, room=1)
    cache.keys, cache.values, cache.recurrent = [torch.zeros(2)], [torch.zeros(5)], SimpleNamespace(row_bytes=10)
    assert cache.nbytes == 4 * 2 + 4 * 5 + 3 * 10


def test_slots_of_a_plan_are_known_once_there_are_layers():
    cache, plan = TreeCache(num_rows=3, room=4), StepPlan.for_prompt(np.array([5, 6, 7]), 2, row=1)
    cache.begin(plan)
    assert cache.room >= 5 and cache.slots is None
    states = torch.zeros(1, 2, 3, 8)
    cache.update(states, states, 0)
    assert cache.slots is None  # of this plan: its first layers wrote without them
    cache.begin(plan)
    assert cache.slots.tolist() == [cache.room + slot for slot in (2, 3, 4)]


def test_rows_are_admitted_while_rooms_fit_to_the_byte():
    rows = [SimpleNamespace(most_cached=length) for length in (20, 30)]
    two_rooms = 2 * ((30 + DRAFT_ROOM) * 8 + 5)
    for spare, fits in ((0, True), (-1, False)):
        within = WithinMemory(num_bytes=two_rooms + spare, bytes_per_token=8, bytes_per_row=5)
        assert within.allows(rows[:1], rows[1]) == fits


def test_what_the_call_before_has_left_counts_as_free(monkeypatch):
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: 500.0)
    assert free_memory.most_bytes(tiny_model("qwen2"), 300) == 0.8 * 800.0
    assert free_memory.most_bytes(tiny_model("qwen2"), 4000) == 4000
