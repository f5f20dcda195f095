"""A long run without its model: recorded lengths through the engine's own scheduler, steps that cost what a roofline
says and keep as many tokens as replayed drafts did."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from workloads.answers import is_decided
from workloads.model_shapes import ModelShape

from stand.forward.cache.tree_cache import DRAFT_ROOM, ROOM_QUANTUM
from stand.row import Row
from stand.scheduling.admission import Admission, beginning
from stand.scheduling.request import Job
from stand.scheduling.scheduler import Scheduler
from stand.scheduling.within_pages import WithinPages

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
    answers: tuple[tuple[str | None, ...], ...] = ()  # per problem, of its samples; empty where nobody votes

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.samples))

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.samples))

    def first_row(self, problem: int) -> int:
        return sum(map(len, self.samples[:problem]))

    def jobs(self) -> list[Job]:
        jobs, first = [], 0
        for number, (prompt, lengths) in enumerate(zip(self.prompts, self.samples, strict=True)):
            rows = range(first, first + len(lengths))
            jobs.append(Job(number, np.zeros(prompt, dtype=np.int32), self.limit, rows, None, number, number))
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
    taken_tokens: np.ndarray  # slots of pages, or of rooms that are as long as the longest row needs, for all places
    num_put_back: int = 0
    num_replayed: int = 0  # tokens whose keys were computed again

    @property
    def steps(self) -> np.ndarray:
        return np.diff(self.seconds, prepend=0.0)

    def occupancy(self, num_places: int) -> float:
        """Mean over time of the share of places that are taken."""
        return float((self.live * self.steps).sum() / (num_places * self.seconds[-1]))

    def rate(self) -> float:
        """Tokens per second."""
        return float(self.tokens.sum() / self.seconds[-1])

    def steady_rate(self, num_places: int) -> float | None:
        """Tokens per second of the steps in which nearly all places are taken: what a run without an end would do;
        None where there is no such step."""
        is_full = self.live >= STEADY_SHARE * num_places
        if not is_full.any():
            return None
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
        self._left: dict[int, int] = {}  # by row that has started: tokens to come
        self._opened: dict[Hashable, Hashable] = {}  # what rows begin with: who owns its memory
        self._num_put_back = self._num_replayed = 0
        self._votes: list[list[str | None]] | None = None  # per problem: the answers of its samples that have ended

    def places(self, admission: Admission, *, until_decided: bool = False) -> Trace:
        """A row that ends hands its place on. until_decided: the rows of a problem end with its vote."""
        self._votes = [[] for _ in self.workload.samples] if until_decided else None
        self._run(self.workload.jobs(), admission)
        return self._trace()

    def blocks(self, size: int, admission: Admission) -> Trace:
        """Blocks of `size` rows one after another."""
        for jobs in self.workload.blocks(size):
            self._run(jobs, admission)
        return self._trace()

    def _trace(self) -> Trace:
        columns = (np.array(column) for column in zip(*self._steps, strict=True))
        return Trace(*columns, self._num_put_back, self._num_replayed)

    def _run(self, jobs: Sequence[Job], admission: Admission) -> None:
        scheduler = Scheduler(iter(jobs), admission)
        while True:
            self._settle(scheduler)
            left = np.array([self._left.get(row.index, self._lengths[row.index]) for row in scheduler.live])
            cached = np.array([row.num_cached for row in scheduler.live])
            if not scheduler.live:
                break
            while (left > 0).all() and (len(left) == 1 or scheduler.is_held()):
                kept = self._step(scheduler, left, cached)
                left, cached = left - kept, cached + kept
            for place in np.flatnonzero(left <= 0):
                row = scheduler.live[place]
                row.finish_reason = "eos"
                scheduler.end(row)
                self._vote(scheduler, row)
            for row in scheduler.rows_left():
                row.finish_reason = "cancelled"
                scheduler.end(row)
            self._left |= zip((row.index for row in scheduler.live), left.tolist(), strict=True)
        self._num_put_back += scheduler.num_put_back

    def _vote(self, scheduler: Scheduler, row: Row) -> None:
        if self._votes is not None:
            answers, votes = self.workload.answers[row.request], self._votes[row.request]
            votes.append(answers[row.index - self.workload.first_row(row.request)])
            if is_decided(votes, len(answers) - len(votes)):
                scheduler.cancel(row.request)

    def _settle(self, scheduler: Scheduler) -> None:
        """As `stand.call.Call` does between steps, prompts in one piece."""
        if not scheduler.is_held():
            self._close(scheduler, {("problem", row.problem) for row in scheduler.live})
        scheduler.settle(lambda row: self._ready(scheduler, row))
        coming = scheduler.next_row() if scheduler.live else None
        self._close(scheduler, {beginning(coming)} if coming is not None else set())

    def _ready(self, scheduler: Scheduler, row: Row) -> bool:
        """What `row` begins with is computed, if it is not at hand."""
        if beginning(row) not in self._opened:
            self._opened[beginning(row)] = scheduler.admission.open(row)
            self._num_replayed += row.num_cached if row.num_steps else 0
            self._now += self.roofline.seconds(row.num_cached, row.num_cached, row.num_cached**2 / 2)
        return True

    def _close(self, scheduler: Scheduler, kept: set[Hashable]) -> None:
        for start in set(self._opened) - kept:
            scheduler.admission.close(start)
            scheduler.admission.release(self._opened.pop(start))

    def _step(self, scheduler: Scheduler, left: np.ndarray, cached: np.ndarray) -> np.ndarray:
        num_rows, nodes = len(left), self.budget / len(left)
        kept = np.minimum(self._generator.geometric(1 / self.acceptance.mean(nodes), num_rows), left)
        self._now += self.roofline.seconds(
            num_rows * (1 + nodes), float(cached.sum()), float(cached.sum()) * (1 + nodes)
        )
        scheduler.admission.take(scheduler.live, (cached + 1 + self.budget // num_rows).tolist())
        taken = self._taken(scheduler, int(cached.max()) + DRAFT_ROOM)
        for row, count in zip(scheduler.live, kept.tolist(), strict=True):
            row.extend([0] * count)
        self._steps.append((self._now, num_rows, int(kept.sum()), nodes, int(cached.sum()), taken))
        return kept

    def _taken(self, scheduler: Scheduler, needed: int) -> int:
        """Slots; needed: of the longest row."""
        if isinstance(scheduler.admission, WithinPages):
            return scheduler.admission.pages.num_used * scheduler.admission.pages.page_size
        if needed > self._room:  # rooms double, up to what the longest row may need
            most = self.workload.limit + max(self.workload.prompts) + DRAFT_ROOM
            self._room = -(-max(needed, min(2 * self._room, most)) // ROOM_QUANTUM) * ROOM_QUANTUM
        return scheduler.num_places * self._room
