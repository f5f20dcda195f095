"""Whole steps and whole generations on one model of random weights: this engine, with and without drafts, and generate.

Needs a GPU; a smoke run takes tiny sizes through the interpreter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from model_shapes import ModelShape
from transformers import AutoModelForCausalLM, PreTrainedModel

from stand.backend import choose_backend, with_fusion
from stand.gpu.captured_step import CapturedStep
from stand.gpu.device_cache import DeviceCache
from stand.gpu.device_rule import RULES
from stand.row import Row
from stand.sampling import SamplingParams, TargetLaw
from stand.trees import DraftBatch, DraftTree
from stand.verifiers import VerifierNoise, get_verifier

LAW = SamplingParams(temperature=0.6)
RULE = "traversal"


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What is timed: rows, committed tokens per row, nodes of all rows together beside the pending ones."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    nodes: tuple[int, ...]
    generated: int  # tokens per timed generation
    repeats: int


FULL = StepSizes(rows=(1, 4, 8, 16), lengths=(2048, 8192, 16384, 32768), nodes=(0, 80, 112), generated=128, repeats=20)
SMOKE = StepSizes(rows=(1, 2), lengths=(70,), nodes=(0, 3), generated=2, repeats=1)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One replay of the whole step, packet and verdict included, and what bandwidth alone would allow."""

    rows: int
    length: int
    nodes: int
    seconds: float  # on the device
    wall: float  # by the host's clock, from launch to verdict
    floor: float  # weights and cached keys and values once, at the measured copy bandwidth

    @property
    def percent(self) -> float:
        return 100 * self.floor / self.seconds


@dataclass(frozen=True, slots=True)
class DecodeTiming:
    """Tokens per second of all rows together, prompts not counted."""

    name: str
    rows: int
    length: int
    tokens_per_second: float


def build(shape: ModelShape, *, device: torch.device, dtype: torch.dtype, max_positions: int) -> PreTrainedModel:
    """The shape with random weights, made where it runs."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config(max_positions=max_positions), dtype=dtype)
    return model.eval()


class StepBench:
    """One model; `kernels` is its captured step's settings as `stand.wrap` would choose them."""

    def __init__(self, shape: ModelShape, sizes: StepSizes, *, model: PreTrainedModel, bytes_per_second: float):
        self.shape, self.sizes, self.model = shape, sizes, model
        self.bytes_per_second = bytes_per_second
        self.verifier = get_verifier(RULE)
        self.backend, self.fusion = with_fusion(model, choose_backend(model, self.verifier, "triton"))
        self._generator = np.random.default_rng(0)

    @torch.inference_mode()
    def steps(self) -> Iterator[StepTiming]:
        """Every size whose cache fits into two thirds of the free memory."""
        for length in self.sizes.lengths:
            for num_rows in self.sizes.rows:
                if not self._fits(num_rows, length):
                    continue
                step = CapturedStep(self.model, TargetLaw(LAW), RULES[RULE](), num_rows=num_rows, fusion=self.fusion)
                step.use(self._random_cache(num_rows, length))
                rows = [Row(row, self._tokens(length + 1), 1) for row in range(num_rows)]
                with step.attention():
                    for nodes in self.sizes.nodes:
                        yield self._timed(step, rows, nodes)

    def decoding(self, engines: dict[str, Callable[[list[list[int]], int], int]]) -> Iterator[DecodeTiming]:
        """Each engine is a function (prompts, new tokens per row) -> tokens generated. Times the second call: the
        first compiles and captures. The prompts' time is taken off by a call for a single token."""
        for length in self.sizes.lengths:
            for num_rows in self.sizes.rows:
                if not self._fits(num_rows, length):
                    continue
                prompts = [self._tokens(length).tolist() for _ in range(num_rows)]
                for name, generate in engines.items():
                    generate(prompts, self.sizes.generated)
                    whole, tokens = _seconds(
                        lambda g=generate, p=prompts: g(p, self.sizes.generated), self.model.device
                    )
                    first, ones = _seconds(lambda g=generate, p=prompts: g(p, 1), self.model.device)
                    yield DecodeTiming(name, num_rows, length, (tokens - ones) / max(whole - first, 1e-9))

    def _timed(self, step: CapturedStep, rows: Sequence[Row], nodes: int) -> StepTiming:
        length, num_rows = rows[0].num_cached, len(rows)
        noise = VerifierNoise(
            seed=0, rows=np.arange(num_rows), steps=np.zeros(num_rows, dtype=np.int64),
            positions=np.full(num_rows, length + 1),
        )  # fmt: skip
        step.prepare(self._drafts(num_rows, nodes), rows, noise)
        seconds, wall = self._replayed(step)
        element = self.model.dtype.itemsize
        moved = element * (self.shape.weight_count() + num_rows * length * self.shape.cache_elements())
        return StepTiming(num_rows, length, nodes, seconds, wall, moved / self.bytes_per_second)

    def _replayed(self, step: CapturedStep) -> tuple[float, float]:
        """Medians: on the device, from the packet to the verdict; and by the host's clock."""
        device, events, walls = self.model.device, [], []
        for _ in range(self.sizes.repeats + 1):
            start = time.perf_counter()
            events.append([_mark(device), step.launch(), _mark(device)])
            step.verdicts()
            walls.append(time.perf_counter() - start)
        if device.type != "cuda":
            return statistics.median(walls[1:]), statistics.median(walls[1:])
        torch.cuda.synchronize(device)
        spans = [first.elapsed_time(last) / 1e3 for first, _, last in events[1:]]
        return statistics.median(spans), statistics.median(walls[1:])

    def _drafts(self, num_rows: int, nodes: int) -> DraftBatch:
        """`nodes` nodes shared out over the rows, in trees of three branches."""
        shares = [nodes // num_rows + (row < nodes % num_rows) for row in range(num_rows)]
        return DraftBatch.concatenate([self._draft(share) for share in shares])

    def _draft(self, nodes: int) -> DraftTree:
        tokens = self._tokens(nodes + 1)
        parents = np.concatenate([[-1], (np.arange(nodes) // 3)]).astype(np.int32)
        support = np.full((nodes + 1, 3), -1, dtype=np.int32)
        law = np.zeros((nodes + 1, 3), dtype=np.float32)
        children = np.arange(1, nodes + 1)
        support[parents[1:], (children - 1) % 3] = tokens[1:]
        law[children, (children - 1) % 3] = 1.0
        return DraftTree(tokens, parents, support, law)

    def _tokens(self, count: int) -> np.ndarray:
        return self._generator.integers(0, self.shape.vocabulary, count).astype(np.int32)

    def _random_cache(self, num_rows: int, length: int) -> DeviceCache:
        cache = DeviceCache(
            num_layers=self.shape.layers, num_rows=num_rows, num_heads=self.shape.key_heads, room=length + 520,
            head_size=self.shape.head_size, dtype=self.model.dtype, device=self.model.device,
        )  # fmt: skip
        cache.storage.normal_()
        return cache

    def _fits(self, num_rows: int, length: int) -> bool:
        if self.model.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self.model.device)
        return num_rows * (length + 520) * self.shape.cache_elements() * self.model.dtype.itemsize < free * 2 / 3


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """A time mark on the device's stream; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(work: Callable[[], int], device: torch.device) -> tuple[float, int]:
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result
