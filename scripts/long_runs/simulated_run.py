"""A long run without its model: recorded lengths through the engine's own scheduler, steps that cost what a roofline
says and keep as many tokens as replayed drafts did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from workloads.model_shapes import ModelShape

from stand.forward.tree_cache import DRAFT_ROOM, ROOM_QUANTUM
from stand.scheduling.admission import Admission
from stand.scheduling.request import Job
from stand.scheduling.scheduler import Entry, Move, Scheduler

ELEMENT = 2  # bytes of a weight, a key or a value
STEADY_SHARE = 0.95  # a run is steady while so many of its places are taken


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of a step: the longer one of moving its bytes and of computing, and what the host adds."""

    shape: ModelShape
    bytes_per_second: float
    flops_per_second: float
    host_seconds: float

    @property
    def cache_bytes(self) -> int:
        """Of one cached token."""
        return ELEMENT * self.shape.cache_elements()

    def seconds(self, num_tokens: float, num_cached: float, num_pairs: float) -> float:
        """For `num_tokens` tokens of all rows, whose rows have `num_cached` tokens in the cache; num_pairs: query
        tokens times the keys of their rows."""
        moved = ELEMENT * self.shape.weight_count() + self.cache_bytes * num_cached
        computed = 2 * self.shape.weight_count() * num_tokens + self.shape.attention_flops() * num_pairs
        return max(moved / self.bytes_per_second, computed / self.flops_per_second) + self.host_seconds


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Tokens per step and row by draft nodes per row, as a replay of recordings measured them."""

    nodes: tuple[float, ...]  # rising, from 0
    tokens: tuple[float, ...]  # 1 without drafts

    def mean(self, nodes_per_row: float) -> float:
        """Linear in log(1 + nodes) between what was measured."""
        return float(np.interp(np.log1p(nodes_per_row), np.log1p(self.nodes), self.tokens))


@dataclass(frozen=True, slots=True)
class Workload:
    """Problems with the lengths of their samples, in tokens."""

    prompts: tuple[int, ...]  # per problem
    samples: tuple[tuple[int, ...], ...]  # per problem, new tokens
    limit: int  # new tokens that a row may get: what its room must hold

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.samples))

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.samples))

    def jobs(self) -> list[Job]:
        jobs, first = [], 0
        for number, (prompt, lengths) in enumerate(zip(self.prompts, self.samples, strict=True)):
            rows = range(first, first + len(lengths))
            jobs.append(Job(number, np.zeros(prompt, dtype=np.int32), self.limit, rows, None, number, None))
            first += len(lengths)
        return jobs

    def blocks(self, size: int) -> Iterator[list[Job]]:
        """As a run that waits for the slowest of every `size` rows of a problem."""
        for job in self.jobs():
            for first in range(0, len(job.rows), size):
                rows = job.rows[first : first + size]
                yield [Job(job.number, job.prompt, job.limit, rows, None, job.problem, None)]


@dataclass(frozen=True, slots=True)
class Trace:
    """One entry per step, arrays [T]; `seconds` is the time at its end."""

    seconds: np.ndarray
    live: np.ndarray  # rows
    tokens: np.ndarray  # kept
    nodes_per_row: np.ndarray
    live_tokens: np.ndarray  # cached tokens of the live rows
    room_tokens: np.ndarray  # slots of rooms that are as long as the longest row needs, for all places

    @property
    def steps(self) -> np.ndarray:
        return np.diff(self.seconds, prepend=0.0)

    def occupancy(self, num_places: int) -> float:
        """Mean over time of the share of places that are taken."""
        return float((self.live * self.steps).sum() / (num_places * self.seconds[-1]))

    def rate(self) -> float:
        """Tokens per second."""
        return float(self.tokens.sum() / self.seconds[-1])

    def steady_rate(self, num_places: int) -> float:
        """Tokens per second of the steps in which nearly all places are taken: what a run without an end would do."""
        is_full = self.live >= STEADY_SHARE * num_places
        return float(self.tokens[is_full].sum() / self.steps[is_full].sum())


class Simulation:
    """Steps of the rows that the scheduler lets in, until all have ended.

    Acceptance is drawn row by row, geometric with the measured mean."""

    def __init__(self, workload: Workload, roofline: Roofline, acceptance: Acceptance, *, budget: int, seed: int = 0):
        """budget: draft nodes of all rows of a step together."""
        self.workload, self.roofline, self.acceptance, self.budget = workload, roofline, acceptance, budget
        self._lengths = np.concatenate([np.array(own, dtype=np.int64) for own in workload.samples])
        self._generator = np.random.default_rng(seed)
        self._now = 0.0
        self._room = 0
        self._steps: list[tuple[float, ...]] = []

    def places(self, admission: Admission) -> Trace:
        """A row that ends hands its place on."""
        self._run(self.workload.jobs(), admission)
        return self._trace()

    def blocks(self, size: int, admission: Admission) -> Trace:
        """Blocks of `size` rows one after another."""
        for jobs in self.workload.blocks(size):
            self._run(jobs, admission)
        return self._trace()

    def _trace(self) -> Trace:
        return Trace(*(np.array(column) for column in zip(*self._steps, strict=True)))

    def _run(self, jobs: Sequence[Job], admission: Admission) -> None:
        scheduler = Scheduler(iter(jobs), admission)
        left, cached = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)  # by place
        begun: set[int] = set()
        while True:
            for change in scheduler.settle(lambda row: True):
                if isinstance(change, Entry):
                    self._prefill(change.row.request, change.row.num_cached, begun)
                    left = _placed(left, change.place, self._lengths[change.row.index])
                    cached = _placed(cached, change.place, change.row.num_cached)
                elif isinstance(change, Move):
                    left[change.target], cached[change.target] = left[change.source], cached[change.source]
            left, cached = left[: len(scheduler.live)], cached[: len(scheduler.live)]
            if not scheduler.live:
                return
            while (left > 0).all():
                kept = self._step(left, cached, scheduler.num_places)
                left, cached = left - kept, cached + kept
            for place in np.flatnonzero(left <= 0):
                row = scheduler.live[place]
                row.finish_reason = "eos"
                scheduler.end(row)

    def _prefill(self, request: int, length: int, begun: set[int]) -> None:
        if request not in begun:
            begun.add(request)
            self._now += self.roofline.seconds(length, length, length * length / 2)

    def _step(self, left: np.ndarray, cached: np.ndarray, num_places: int) -> np.ndarray:
        num_rows, nodes = len(left), self.budget / len(left)
        kept = np.minimum(self._generator.geometric(1 / self.acceptance.mean(nodes), num_rows), left)
        self._now += self.roofline.seconds(
            num_rows * (1 + nodes), float(cached.sum()), float(cached.sum()) * (1 + nodes)
        )
        needed = int(cached.max()) + DRAFT_ROOM
        if needed > self._room:  # rooms double, up to what the longest row may need
            most = self.workload.limit + max(self.workload.prompts) + DRAFT_ROOM
            self._room = -(-max(needed, min(2 * self._room, most)) // ROOM_QUANTUM) * ROOM_QUANTUM
        self._steps.append((self._now, num_rows, int(kept.sum()), nodes, int(cached.sum()), num_places * self._room))
        return kept


def _placed(values: np.ndarray, place: int, value: int) -> np.ndarray:
    """`values` with `value` at `place`, which may be the one behind the last."""
    if place == len(values):
        return np.append(values, value)
    values[place] = value
    return values
