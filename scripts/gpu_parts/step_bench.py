"""Whole captured steps on one model: their time by rows, context length and nodes, and the cost table of drafts.

The cost table is the one that an engine reads: `stand.drafters.costs.step_cost.CostTable`, over context lengths and
rows. Keys are random and not computed from a prompt, which would cost more time than the steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from gpu_parts.bench_model import BenchModel, step_noise
from gpu_parts.bench_record import Measurement
from stand.drafters.costs.step_cost import CostTable, StepCost, measure_cost, table_path
from stand.forward.model import size_name, text_config
from stand.gpu.captured_step import CapturedStep
from stand.gpu.tuning.device_timer import device_name
from stand.row import Row
from stand.trees import DraftBatch, DraftTree

RATIOS = (1.05, 1.10, 1.25)  # step time over that of one token
BRANCHES = 3


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What is timed: rows, committed tokens per row, nodes of all rows together beside the pending ones."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    nodes: tuple[int, ...]
    costs: tuple[tuple[int, int], ...]  # rows and committed tokens per row, of the cost table
    most_tokens: int  # of the cost table
    repeats: int


FULL = StepSizes(
    rows=(1, 4, 8, 16), lengths=(2048, 8192, 16384, 32768), nodes=(0, 80, 112),
    costs=((1, 2048), (16, 2048), (64, 2048), (1, 8192), (1, 16384), (16, 16384), (1, 32768)), most_tokens=256,
    repeats=20,
)  # fmt: skip
SMOKE = StepSizes(rows=(1, 2), lengths=(70,), nodes=(0, 3), costs=((1, 70), (2, 70)), most_tokens=3, repeats=1)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One step, packet and verdict included, and what bandwidth alone would allow."""

    HEADER: ClassVar = (
        "rows", "length", "nodes", "device ms", "x without nodes", "host ms", "idle us", "floor ms", "% of floor",
    )  # fmt: skip

    rows: int
    length: int
    nodes: int
    seconds: float  # on the device, steps one behind the other without a gap
    wall: float  # by the host's clock, from the packet's filling to the verdict
    floor: float  # weights and cached keys and values once, at the measured bandwidth
    ratio: float | None = None  # of `seconds` to those of the same rows without nodes

    @property
    def idle(self) -> float:
        """Seconds of the host's step in which the device has nothing to do, or ranks the best tokens of the step
        before; drafting and commitment, which an engine adds, are not in it (see `trajectory_replay`)."""
        return self.wall - self.seconds

    @property
    def percent(self) -> float:
        """Of the floor's speed."""
        return 100 * self.floor / self.seconds

    def cells(self) -> tuple[object, ...]:
        times = (1e3 * self.seconds, self.ratio, 1e3 * self.wall, 1e6 * self.idle, 1e3 * self.floor)
        return (self.rows, self.length, self.nodes, *times, self.percent)


@dataclass(frozen=True, slots=True)
class CostFigure:
    """A `StepCost`, and its knees: the most tokens that cost at most 1.05, 1.10, 1.25 times one per row."""

    HEADER: ClassVar = ("rows", "length", "ms, no nodes", *(f"tokens at {ratio:.2f} x" for ratio in RATIOS))

    rows: int
    length: int
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    knees: tuple[int, ...]  # by `RATIOS`

    @classmethod
    def of(cls, cost: StepCost) -> CostFigure:
        knees = tuple(cost.knee(ratio) for ratio in RATIOS)
        return cls(cost.num_rows, cost.length, cost.tokens, cost.seconds, knees)

    def cells(self) -> tuple[object, ...]:
        return (self.rows, self.length, 1e3 * self.seconds[0], *self.knees)


class StepBench:
    """`costs` grows as they are measured; after each the table goes to `cost_folder`, if there is one."""

    def __init__(
        self, bench: BenchModel, sizes: StepSizes, *, bytes_per_second: float, cost_folder: Path | None = None
    ):
        self.bench, self.sizes, self.bytes_per_second = bench, sizes, bytes_per_second
        self.costs: list[StepCost] = []
        self.cost_path = None if cost_folder is None else cost_table_path(cost_folder, bench)

    def cost_measurements(self, *, longest: int | None = None) -> Iterator[Measurement]:
        """longest: of the rows that are to be drafted for; what is measured behind longer ones is left out then."""
        nearest = min(length for _, length in self.sizes.costs)
        for num_rows, length in self.sizes.costs:
            if longest is None or length <= max(longest, nearest):
                label, work = f"cost, {num_rows} rows, length {length}", partial(self.measured_cost, num_rows, length)
                yield Measurement(label, work, self.bench.obstacle(num_rows, length))

    def step_measurements(self) -> Iterator[Measurement]:
        for length in self.sizes.lengths:
            for num_rows in self.sizes.rows:
                label = f"steps, {num_rows} rows, length {length}"
                work = partial(self.steps, num_rows, length)
                yield Measurement(label, work, self.bench.obstacle(num_rows, length))

    @torch.inference_mode()
    def measured_cost(self, num_rows: int, length: int) -> list[CostFigure]:
        """Steps behind `length` tokens per row, num_rows .. most_tokens packed tokens."""
        step, rows = self.bench.step(num_rows, length)
        noise = step_noise(rows)

        def run_step(batch: DraftBatch) -> None:
            step.prepare(batch, rows, noise)
            step.launch()
            step.verdicts()

        with step.attention():
            sizes = {"num_rows": num_rows, "length": length, "most_tokens": self.sizes.most_tokens}
            cost = measure_cost(run_step, **sizes, vocab_size=text_config(self.bench.model).vocab_size)
        self.costs.append(cost)
        if self.cost_path is not None:
            CostTable(tuple(self.costs)).save(self.cost_path)
        return [CostFigure.of(cost)]

    @torch.inference_mode()
    def steps(self, num_rows: int, length: int) -> list[StepTiming]:
        """One cache, every number of nodes."""
        step, rows = self.bench.step(num_rows, length)
        with step.attention():
            timings = [self._timed(step, rows, nodes) for nodes in self.sizes.nodes]
        plain = {timing.nodes: timing.seconds for timing in timings}.get(0)
        return [replace(timing, ratio=plain and timing.seconds / plain) for timing in timings]

    def _timed(self, step: CapturedStep, rows: Sequence[Row], nodes: int) -> StepTiming:
        num_rows, length = len(rows), rows[0].num_cached
        batch, noise, walls = self.drafts(num_rows, nodes), step_noise(rows), []
        for _ in range(self.sizes.repeats + 1):
            start = time.perf_counter()
            step.prepare(batch, rows, noise)
            step.launch()
            step.verdicts()
            walls.append(time.perf_counter() - start)
        wall = statistics.median(walls[1:])  # the first one captures
        seconds = self._device_seconds(step) if self.bench.device.type == "cuda" else wall
        floor = self.bench.step_bytes(num_rows, length) / self.bytes_per_second
        return StepTiming(num_rows, length, nodes, seconds, wall, floor)

    def _device_seconds(self, step: CapturedStep) -> float:
        """One step's share of a queue of steps, in which no step waits for its launch."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        step.launch()
        with torch.cuda.device(self.bench.device):  # on whose stream events are recorded
            first.record()
            for _ in range(self.sizes.repeats):
                step.launch()
            last.record()
        torch.cuda.synchronize(self.bench.device)
        step.verdicts()
        return first.elapsed_time(last) / 1e3 / self.sizes.repeats

    def drafts(self, num_rows: int, nodes: int) -> DraftBatch:
        """`nodes` nodes shared out over the rows, in trees of three branches."""
        shares = [nodes // num_rows + (row < nodes % num_rows) for row in range(num_rows)]
        return DraftBatch.concatenate([self._draft(share) for share in shares])

    def _draft(self, nodes: int) -> DraftTree:
        return DraftTree.branching(self.bench.tokens(nodes + 1), BRANCHES)


def cost_table_path(folder: Path, bench: BenchModel) -> Path:
    """Where `stand.wrap` looks for this model's table."""
    return table_path(
        folder, model=size_name(bench.model), device=device_name(bench.device), dtype=str(bench.model.dtype)
    )
