"""Memory that stands behind addresses of this process, as Linux counts it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def resident_bytes(ranges: Sequence[tuple[int, int]]) -> int:
    """Of mappings within these (start, bytes) of addresses; a page that several of them show counts once, and in part
    where other mappings show it too (`Pss` of /proc/self/smaps). Pages of zeros that were only read count nothing."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(number, 16) for number in head.split("-"))
            is_inside = any(first <= start and end <= first + nbytes for first, nbytes in ranges)
        elif is_inside and head == "Pss:":
            total += 1024 * int(line.split()[1])
    return total
