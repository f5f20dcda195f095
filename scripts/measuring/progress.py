"""What a long run says on stderr: each piece of work as it ends, and how long the rest will take."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from stand.scheduling.run import Run


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Counts `total` units of work, which should take about equally long. The clock starts at once.

    done: units of an earlier session, which took none of this one's time.
    """

    def __init__(self, total: float, done: float = 0.0) -> None:
        self.total = total
        self.done = self._earlier = done
        self._start = time.monotonic()

    def add(self, units: float, line: str) -> None:
        """So many units ended: say `line`, the share that is done and the time that the rest takes at this pace."""
        self.done += units
        spent = time.monotonic() - self._start
        share = min(self.done / self.total, 1.0) if self.total else 1.0
        own, rest = self.done - self._earlier, max(self.total - self.done, 0.0)
        left = f", {duration(spent / own * rest)} left" if own else ", 0 s left" if not rest else ""
        say(f"{line} ({100 * share:.0f} % done{left})")


class RunProgress:
    """What a run of trajectories says while it lasts: on a terminal a bar (tqdm), else a line every `every` seconds."""

    def __init__(self, total: int, done: int, *, stream: TextIO | None = None, every: float = 10.0) -> None:
        """done: trajectories of earlier sessions, of `total`."""
        self._total, self._earlier, self._done = total, done, done
        self._stream = sys.stderr if stream is None else stream
        self._start = self._said = time.monotonic()
        self._bar = None
        self._every = every
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar, self._every = tqdm(total=total, initial=done, unit="row", file=self._stream), 0.5

    def step(self, run: Run) -> None:
        """A step was made: say how things stand, if it is time."""
        if time.monotonic() - self._said >= self._every:
            self._say(run)

    def count(self, done: int) -> None:
        """So many trajectories have ended, earlier sessions' included."""
        if self._bar is not None:
            self._bar.update(done - self._done)
        self._done = done

    def close(self, run: Run | None) -> None:
        """The last word of this session."""
        if run is not None:
            self._say(run)
        if self._bar is not None:
            self._bar.close()

    def _say(self, run: Run) -> None:
        self._said = time.monotonic()
        rates = f"{run.stats.num_tokens / run.stats.elapsed:.0f} tokens/s, " if run.stats.elapsed else ""
        state = f"{run.num_live} rows live, {rates}{run.stats.mean_acceptance_length:.2f} tokens/step"
        if run.stats.num_put_back:
            state += f", {run.stats.num_put_back} times a row was put back"
        if self._bar is not None:
            self._bar.set_postfix_str(state)
            return
        ended = self._done - self._earlier
        left = (self._total - self._done) * (self._said - self._start) / ended if ended else None
        known = "" if left is None else f", {duration(left)} left"
        print(f"{self._done} of {self._total} trajectories, {state}{known}", file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """42 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
