"""Plain decoding, end to end: this engine at one token per step in six ways, and transformers' generate, on one model.

Figures are tokens per second of all rows behind the prompt: the time of a call for a single token is taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from gpu_parts.bench_model import BenchModel
from gpu_parts.bench_record import Measurement
from stand.backend import Backend, CapturedBackend, EagerBackend

OURS, EAGER, COMPILED = "stand, no drafts", "generate, eager", "generate, static + compile"
FILTERED, UNFUSED, SDPA = "stand, top_p", "stand, fuse=False", "stand, backend=sdpa"
PENALISED, NOTED = "stand, repetition_penalty", "stand, logprobs"
SLOW = (EAGER, SDPA)
TEMPERATURE, TOP_P, PENALTY, LOGPROBS = 0.6, 0.95, 1.05, 20


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """`cells` (engine, rows, committed tokens per row), the most telling first; `generated` tokens per row each, and
    `slowly_generated` by what launches every operation by itself.

    `compiled_cells` are those of torch.compile, which takes minutes and is a part of its own.
    """

    cells: tuple[tuple[str, int, int], ...]
    compiled_cells: tuple[tuple[str, int, int], ...]
    generated: int
    slowly_generated: int


FULL = DecodeSizes(
    cells=(
        (OURS, 1, 2048), (EAGER, 1, 2048), (FILTERED, 1, 2048), (PENALISED, 1, 2048), (UNFUSED, 1, 2048),
        (SDPA, 1, 2048), (OURS, 8, 2048), (EAGER, 8, 2048), (FILTERED, 8, 2048), (NOTED, 8, 2048), (OURS, 1, 16384),
        (EAGER, 1, 16384), (PENALISED, 1, 16384), (OURS, 4, 2048), (EAGER, 4, 2048), (OURS, 16, 2048),
        (EAGER, 16, 2048),
    ),
    compiled_cells=((COMPILED, 1, 2048),),
    generated=128,
    slowly_generated=32,
)  # fmt: skip
SMOKE = DecodeSizes(
    cells=tuple((engine, 1, 5) for engine in (OURS, EAGER, FILTERED, PENALISED, NOTED, UNFUSED, SDPA)),
    compiled_cells=(), generated=3, slowly_generated=3,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeTiming:
    """Tokens per second of all rows together, and what bandwidth alone would allow."""

    HEADER: ClassVar = ("engine", "rows", "length", "tokens/s", "ms/step", "limit tokens/s", "% of limit")

    engine: str
    rows: int
    length: int
    tokens_per_second: float
    limit: float  # weights and cached keys and values once per step, at the measured bandwidth

    @property
    def percent(self) -> float:
        return 100 * self.tokens_per_second / self.limit

    def cells(self) -> tuple[object, ...]:
        step_ms = 1e3 * self.rows / self.tokens_per_second
        return (self.engine, self.rows, self.length, self.tokens_per_second, step_ms, self.limit, self.percent)


class DecodeBench:
    """All engines share the model, and so its weights, of which the fused forwards of ours use merged views."""

    def __init__(self, bench: BenchModel, sizes: DecodeSizes, *, bytes_per_second: float):
        self.bench, self.sizes, self.bytes_per_second = bench, sizes, bytes_per_second
        self._engines: dict[str, Callable[[list[list[int]], int], int]] = {
            OURS: self._with_stand,
            FILTERED: partial(self._with_stand, top_p=TOP_P),
            PENALISED: partial(self._with_stand, penalty=PENALTY),
            NOTED: partial(self._with_stand, logprobs=LOGPROBS),
            UNFUSED: partial(self._with_stand, backend=CapturedBackend(bench.model, "not fused")),
            SDPA: partial(self._with_stand, backend=EagerBackend(bench.model, "asked for")),
            EAGER: self._with_generate,
            COMPILED: partial(self._with_generate, cache_implementation="static"),
        }

    def measurements(self) -> Iterator[Measurement]:
        return self._measurements(self.sizes.cells)

    def compiled_measurements(self) -> Iterator[Measurement]:
        return self._measurements(self.sizes.compiled_cells)

    def _measurements(self, cells: tuple[tuple[str, int, int], ...]) -> Iterator[Measurement]:
        for engine, num_rows, length in cells:
            label = f"decoding, {engine}, {num_rows} rows, length {length}"
            work = partial(self.timings, engine, num_rows, length)
            yield Measurement(label, work, self.bench.obstacle(num_rows, length, copies=2))  # the prompts' is copied

    def timings(self, engine: str, num_rows: int, length: int) -> list[DecodeTiming]:
        """One: of the second call, because the first one compiles and captures."""
        prompts = [self.bench.tokens(length).tolist() for _ in range(num_rows)]
        generate = self._engines[engine]
        count = self.sizes.slowly_generated if engine in SLOW else self.sizes.generated
        generate(prompts, count)
        whole, tokens = self._seconds(partial(generate, prompts, count))
        first, ones = self._seconds(partial(generate, prompts, 1))
        if whole <= first:
            raise RuntimeError(
                f"{count} tokens must take longer than one, got {whole:.4f} and {first:.4f} s; generate more tokens"
            )
        limit = num_rows * self.bytes_per_second / self.bench.step_bytes(num_rows, length + count / 2)
        return [DecodeTiming(engine, num_rows, length, (tokens - ones) / (whole - first), limit)]

    def _seconds(self, work: Callable[[], int]) -> tuple[float, int]:
        start = time.perf_counter()
        result = work()
        if self.bench.device.type == "cuda":
            torch.cuda.synchronize(self.bench.device)
        return time.perf_counter() - start, result

    def _with_stand(
        self,
        prompts: list[list[int]],
        count: int,
        *,
        top_p: float = 1.0,
        penalty: float = 1.0,
        logprobs: int | None = None,
        backend: Backend | None = None,
    ) -> int:
        """backend: in place of the engine's own, for this call."""
        engine = self.bench.engine
        own, engine.backend = engine.backend, backend or engine.backend
        name = engine.backend.name
        try:
            output = engine.generate(
                input_ids=prompts, max_new_tokens=count, temperature=TEMPERATURE, top_k=0, top_p=top_p,
                repetition_penalty=penalty, stop_token_ids=[], seed=0, draft=False, logprobs=logprobs,
            )  # fmt: skip
            if engine.backend.name != name:
                raise RuntimeError(f"the back end must stay {name}, got {engine.backend}: {engine.backend.reason}")
        finally:
            engine.backend = own
        return sum(map(len, output.token_ids))

    def _with_generate(self, prompts: list[list[int]], count: int, **settings: str) -> int:
        """A static cache makes generate compile the forward of a decoding step."""
        input_ids = torch.tensor(prompts, device=self.bench.device)
        output = self.bench.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            **settings,
        )
        return output.shape[0] * (output.shape[1] - input_ids.shape[1])
