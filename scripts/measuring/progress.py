"""What a long run says on stderr: each piece of work as it ends, and how long the rest will take."""

from __future__ import annotations

import sys
import time


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Counts `total` units of work, which should take about equally long. The clock starts at once."""

    def __init__(self, total: float) -> None:
        self.total = total
        self.done = 0.0
        self._start = time.monotonic()

    def add(self, units: float, line: str) -> None:
        """So many units ended: say `line`, the share that is done and the time that the rest takes at this pace."""
        self.done += units
        spent = time.monotonic() - self._start
        share = self.done / self.total if self.total else 1.0
        left = f", {duration(spent / share - spent)} left" if share else ""
        say(f"{line} ({100 * share:.0f} % done{left})")


def duration(seconds: float) -> str:
    """42 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
