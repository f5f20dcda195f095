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
        left = (time.monotonic() - self._start) * (self.total - self.done) / self.done
        say(f"{line} ({100 * self.done / self.total:.0f} % done, {duration(left)} left)")


def duration(seconds: float) -> str:
    """42 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
