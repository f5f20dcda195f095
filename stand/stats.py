"""What a generation cost and what its drafts were worth."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from stand.trees import DraftBatch

VERBS = ("draft", "forward", "verify", "commit", "learn")


@dataclass(slots=True)
class Stats:
    """Additive counters; `a + b` describes both runs. Times are seconds.

    A *row-step* is one verification of one row, so `num_tokens / num_steps` is the mean acceptance length with the
    bonus token included. Tokens cut off behind an end token are not counted.
    """

    num_steps: int = 0  # row-steps
    num_forwards: int = 0  # model calls after the prompts
    num_tokens: int = 0  # tokens emitted
    num_draft_tokens: int = 0  # drafted nodes, roots excluded
    num_accepted_draft_tokens: int = 0  # drafted nodes that were emitted
    num_prompt_tokens: int = 0  # prompt tokens, each prompt counted once
    num_copied_prompt_tokens: int = 0  # whose keys were another prompt's that begins alike
    num_put_back: int = 0  # times that a row went away, for lack of memory or as it outgrew its factors (LongRoPE)
    num_replayed_tokens: int = 0  # tokens of such rows whose keys were computed again
    accepted_by_depth: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [D], depth 1 first
    accepted_by_slot: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [slots of the shape]
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(VERBS, 0.0))
    prefill_seconds: float = 0.0
    wall_seconds: float = 0.0
    _began: float | None = field(default=None, init=False, repr=False, compare=False)  # the wall time's open block
    _verb: str | None = field(default=None, init=False, repr=False, compare=False)  # that is being timed
    _changed: float = field(default=0.0, init=False, repr=False, compare=False)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per row-step, bonus token included; 1.0 is ordinary decoding."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted tokens. Low for wide drafts by nature: siblings exclude each other."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens of all rows per second of wall time, prompts included in the time."""
        return self.num_tokens / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def scoring_seconds(self) -> float:
        """Time of the forwards and verdicts, which is what a draft's nodes cost."""
        return self.seconds["forward"] + self.seconds["verify"]

    @property
    def overhead(self) -> float:
        """Share of the step time that is not the model's forward."""
        total = sum(self.seconds.values())
        return 1.0 - self.seconds["forward"] / total if total else 0.0

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            num_steps=self.num_steps + other.num_steps,
            num_forwards=self.num_forwards + other.num_forwards,
            num_tokens=self.num_tokens + other.num_tokens,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens + other.num_accepted_draft_tokens,
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_copied_prompt_tokens=self.num_copied_prompt_tokens + other.num_copied_prompt_tokens,
            num_put_back=self.num_put_back + other.num_put_back,
            num_replayed_tokens=self.num_replayed_tokens + other.num_replayed_tokens,
            accepted_by_depth=_add_padded(self.accepted_by_depth, other.accepted_by_depth),
            accepted_by_slot=_add_padded(self.accepted_by_slot, other.accepted_by_slot),
            seconds={verb: self.seconds[verb] + other.seconds[verb] for verb in VERBS},
            prefill_seconds=self.prefill_seconds + other.prefill_seconds,
            wall_seconds=self.wall_seconds + other.wall_seconds,
        )

    def work_on(self, verb: str | None) -> str | None:
        """Add the wall time from here to the next call to `seconds[verb]`, None: to nothing. What it went to before."""
        now, before = time.perf_counter(), self._verb
        if before is not None:
            self.seconds[before] += now - self._changed
        self._verb, self._changed = verb, now
        return before

    @contextmanager
    def timed_prefill(self) -> Iterator[None]:
        """Add the wall time of the block to `prefill_seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.prefill_seconds += time.perf_counter() - start

    @contextmanager
    def timed_wall(self) -> Iterator[None]:
        """Add the wall time of the block to `wall_seconds`. `elapsed` counts it while the block runs."""
        self._began = time.perf_counter()
        try:
            yield
        finally:
            self.wall_seconds, self._began = self.elapsed, None

    @contextmanager
    def paused_wall(self) -> Iterator[None]:
        """A part of a `timed_wall` block that does not count."""
        self.wall_seconds, self._began = self.elapsed, None
        try:
            yield
        finally:
            self._began = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Wall seconds so far, the block that is running included."""
        return self.wall_seconds + (0.0 if self._began is None else time.perf_counter() - self._began)

    def count_step(self, batch: DraftBatch, accepted: Sequence[np.ndarray], num_kept: Sequence[int]) -> None:
        """Count one step in which the first num_kept[b] nodes of row b's path accepted[b], at depths 1, 2, ..., were
        emitted (`num_tokens` is the caller's)."""
        self.num_forwards += 1
        self.num_steps += len(num_kept)
        self.num_draft_tokens += batch.num_nodes - len(num_kept)
        if not any(num_kept):
            return
        self.num_accepted_draft_tokens += sum(num_kept)
        by_depth = [0] * max(num_kept)
        for count in num_kept:
            if count:
                by_depth[count - 1] += 1
        for depth in range(len(by_depth) - 1, 0, -1):  # who keeps a node keeps those above it
            by_depth[depth - 1] += by_depth[depth]
        self.accepted_by_depth = _added(self.accepted_by_depth, by_depth)
        if batch.slots is not None:
            paths = zip(batch.offsets, accepted, num_kept, strict=False)
            nodes = np.concatenate([first + path[:count] for first, path, count in paths])
            self.accepted_by_slot = _added(self.accepted_by_slot, np.bincount(batch.slots[nodes]))

    def as_dict(self) -> dict[str, object]:
        """Counters and derived rates as plain JSON values."""
        return {
            "num_steps": self.num_steps,
            "num_forwards": self.num_forwards,
            "num_tokens": self.num_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_copied_prompt_tokens": self.num_copied_prompt_tokens,
            "num_put_back": self.num_put_back,
            "num_replayed_tokens": self.num_replayed_tokens,
            "accepted_by_depth": self.accepted_by_depth.tolist(),
            "accepted_by_slot": self.accepted_by_slot.tolist(),
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "tokens_per_second": self.tokens_per_second,
            "overhead": self.overhead,
            "seconds": dict(self.seconds),
            "prefill_seconds": self.prefill_seconds,
            "wall_seconds": self.wall_seconds,
        }


def _added(total: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """`total`, which is written to and grows where it must, and `counts`."""
    if len(counts) > len(total):
        return _add_padded(total, counts)
    total[: len(counts)] += counts
    return total


def _add_padded(left: np.ndarray, right: Sequence[int]) -> np.ndarray:
    length = max(len(left), len(right))
    total = np.zeros(length, dtype=np.int64)
    total[: len(left)] += left
    total[: len(right)] += right
    return total
