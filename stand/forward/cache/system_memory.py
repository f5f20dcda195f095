"""The memory of this machine, as its operating system tells of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stand.trees.system_program import printed_by

VM_STAT = "/usr/bin/vm_stat"
PAGE_SIZE = re.compile(r"page size of (\d+) bytes")
GIVEN_AWAY = re.compile(r"^Pages (?:free|inactive|speculative):\s+(\d+)", re.MULTILINE)


def whole_memory() -> int:
    """Bytes of all of it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> float:
    """Bytes that can be had: what Linux calls available, caches of files included, else its free pages; on macOS those
    that are free, inactive or read ahead; half of all where a system says nothing of that."""
    for told in (_linux_available, _free_pages, _macos_available):
        if (nbytes := told()) is not None:
            return nbytes
    return whole_memory() / 2


def _linux_available() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def _free_pages() -> float | None:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    except ValueError:  # a name that macOS does not have
        return None


def _macos_available() -> float | None:
    """The sum of what `vm_stat` counts, in pages of its own size: an emulated process has smaller ones."""
    printed = printed_by(VM_STAT) or ""
    size, counts = PAGE_SIZE.search(printed), GIVEN_AWAY.findall(printed)
    return float(int(size[1]) * sum(map(int, counts))) if size and counts else None
