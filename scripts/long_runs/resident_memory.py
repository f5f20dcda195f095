"""Memory that stands behind addresses of this process, as Linux counts it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def resident_bytes(ranges: Sequence[tuple[int, int]]) -> int:
    """Of mappings within these (start, bytes) of addresses, by /proc/self/smaps: of a private mapping the pages that
    were written there, of a shared one all that are in memory. So pages that several mappings show count once, and
    zeros that were only read count nothing. Linux joins neighbours, so a mapping counts that lies there in part."""
    total, counted = 0, None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            start, end = (int(number, 16) for number in name.split("-"))
            is_inside = any(first < end and start < first + nbytes for first, nbytes in ranges)
            counted = ("Rss:" if rest[0].endswith("s") else "Anonymous:") if is_inside else None
        elif name == counted:
            total += 1024 * int(rest[0])
    return total
