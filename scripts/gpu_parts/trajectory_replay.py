"""Recorded trajectories on a real forward: everything is executed, only the sampled tokens are those of the recording.

For a rule that draws from the target and follows what was drafted this is unbiased: the recorded token is a draw from
the recorded model. It measures tokens per step, nodes, step time on device and host, tokens per second and when rows
end. What it cannot measure is said at `RecordedRule`.

The samples of a problem are decoded `rows` at a time; the lookup starts empty with every problem and keeps what
it learned from one batch to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from table_parts.token_drafter import TokenDrafter
from transformers import PreTrainedModel
from workloads.recordings import Recording, by_problem

from gpu_parts.bench_model import BenchModel
from gpu_parts.bench_record import Measurement
from stand.call import Call
from stand.drafters.costs.step_cost import CostTable
from stand.engine import Engine
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.ranks import ALONE
from stand.fusion.fusion import Fusion
from stand.gpu.captured_step import CapturedStep
from stand.gpu.device_rule import DeviceVerdict, MatchRule, follow_drawn
from stand.gpu.packets.packet import Field
from stand.gpu.packets.step_size import StepSize, sizes_for
from stand.output import GenerationOutput
from stand.row import Row
from stand.scheduling.request import Job
from stand.stats import Stats
from stand.step import StepStart
from stand.trees import BlendedLookup, DraftBatch
from stand.verifiers import VerifierNoise, get_verifier

TEMPERATURE, TOP_P = 0.6, 0.95  # of the laws that are computed; the tokens are the recording's
PLAIN, FIXED, MEASURED = "no drafts", "{} nodes", "measured costs"


class RecordedRule(MatchRule):
    """Draws as `match` does, then goes on with the recorded token of the position.

    Not measured by a replay: the law and the quality of the output; learning from the target's laws, because the
    random model's mean nothing, so that the lookup counts recorded tokens (on drafted paths that were rejected it
    learns nothing); the acceptance of rules that test drafted laws (`traversal`) or share the drafter's noise
    (`coupled`), for which this is a lower bound; and rounding that turns a greedy token in 16-bit types.
    """

    def __init__(self, streams: Sequence[np.ndarray]):
        self.streams = streams  # per row: prompt, recorded tokens and the end token, int64

    def fields(self, size: StepSize) -> dict[str, Field]:
        return {**super().fields(size), "recorded": (np.int64, (size.num_tokens,))}

    def fill(self, host: Mapping[str, np.ndarray], batch: DraftBatch, noise: VerifierNoise) -> None:
        super().fill(host, batch, noise)
        recorded = host["recorded"]
        recorded[batch.num_nodes :] = 0
        for row, position, first, end in zip(
            noise.rows, noise.positions, batch.offsets[:-1], batch.offsets[1:], strict=True
        ):
            stream = self.streams[row]
            recorded[first:end] = stream[np.minimum(position + batch.depths[first:end], len(stream) - 1)]

    def decide(
        self, logits: torch.Tensor, laws: torch.Tensor, step: Mapping[str, torch.Tensor], verdict: DeviceVerdict
    ) -> None:
        super().decide(logits, laws, step, verdict)
        follow_drawn(step["recorded"], laws, step, verdict)


class TimedStep(CapturedStep):
    """A captured step that knows how long the device worked, and how long recording took, which happens once per size.

    The device's time of a step begins with its launch, so that the way of the launch to the device counts as work.
    """

    def __init__(self, *arguments, rule: RecordedRule, **settings):
        """rule: in place of the verifier's."""
        super().__init__(*arguments, **settings)
        self._rule = rule
        self.recording_seconds = 0.0
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._spare_marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # a new one takes longer than a record

    def launch(self) -> None:
        if self._model.device.type != "cuda":
            super().launch()
            return
        stream = torch.cuda.current_stream(self._model.device)
        marks = self._spare_marks.pop() if self._spare_marks else new_marks()
        marks[0].record(stream)
        super().launch()
        marks[1].record(stream)
        self._marks.append(marks)

    def device_seconds(self) -> float | None:
        """Of all steps since the last time this was asked; None on a CPU."""
        if self._model.device.type != "cuda":
            return None
        torch.cuda.synchronize(self._model.device)
        seconds = sum(first.elapsed_time(last) for first, last in self._marks) / 1e3
        self._spare_marks += self._marks
        self._marks.clear()
        return seconds

    def _record(self, size: StepSize):
        start = time.perf_counter()
        recorded = super()._record(size)
        self.recording_seconds += time.perf_counter() - start
        return recorded


def new_marks() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


@dataclass(frozen=True, slots=True)
class Finish:
    """When a row ended: seconds since the prompts, steps made, tokens emitted."""

    row: int
    tokens: int
    steps: int
    seconds: float


class ReplayBackend:
    """Makes timed steps whose rows go on as recorded."""

    name = "triton"
    reason = "recorded trajectories are replayed"
    most_rows = num_slots = most_drafted = page_size = None
    held_bytes = 0
    has_pool = False
    ranks = ALONE
    computes_elsewhere = True

    def __init__(self, model: PreTrainedModel, fusion: Fusion | None):
        self.rule = RecordedRule(())
        self.step: TimedStep | None = None
        self.start = 0.0  # when decoding began
        self._model = model
        self.fusion = fusion
        self.step_sizes = sizes_for(model)

    def __str__(self) -> str:
        return self.name

    def new_recorder(self) -> None:
        """Drafters of replays have no modules."""

    def key_maker(self) -> Callable[[int], TreeCache]:
        return partial(TreeCache, 1)

    def new_step(self, start: StepStart) -> TimedStep:
        if self.step is None or not self.step.serves(start):
            asked = {"num_rows": start.num_places, "fusion": self.fusion}
            self.step = TimedStep(self._model, start.law, start.verifier, rule=self.rule, **asked)
        self.step.begin(start)
        self.start = time.perf_counter() - self.step.recording_seconds
        return self.step


class ReplayEngine(Engine):
    """An engine whose rows continue as recorded; made from one that `stand.wrap` has checked and fused."""

    def __init__(self, engine: Engine):
        super().__init__(
            engine.model, None,
            drafter=TokenDrafter(BlendedLookup(), budget=0, kind="deterministic"), verifier=get_verifier("match"),
            backend=ReplayBackend(engine.model, engine.backend.fusion),
        )  # fmt: skip
        self.finishes: list[Finish] = []  # of the last call

    def replay(self, recordings: Sequence[Recording], *, end_token: int, draft: bool = True) -> GenerationOutput:
        """Recordings of one problem as the rows of one batch; every row ends where its recording does.

        Raises RuntimeError should a row leave its recording.
        """
        longest = max(len(recording.tokens) for recording in recordings) + 1
        self.backend.rule.streams = [
            np.concatenate([recording.prompt, recording.tokens, [end_token]]).astype(np.int64)
            for recording in recordings
        ]
        self.finishes = []
        output = self.generate(
            input_ids=recordings[0].prompt[None],
            num_return_sequences=len(recordings),
            max_new_tokens=longest,
            stop_token_ids=[end_token],
            temperature=TEMPERATURE,
            top_k=0,
            top_p=TOP_P,
            seed=0,
            draft=draft,
        )
        for recording, tokens in zip(recordings, output.token_ids, strict=True):
            if tokens != [*recording.tokens.tolist(), end_token]:
                raise RuntimeError(f"row {recording.sample} must end as recorded, got {len(tokens)} other tokens")
        return output

    @property
    def step(self) -> TimedStep:
        """Of the last call."""
        return self.backend.step

    def _new_call(self, prompts: None, on_commit: None, /, **settings: object) -> tuple[Call, list[Job]]:
        return super()._new_call(prompts, self._note_end, **settings)

    def _note_end(self, row: Row, token_ids: list[int]) -> None:
        if row.finish_reason is not None:
            seconds = time.perf_counter() - self.step.recording_seconds - self.backend.start
            self.finishes.append(Finish(row.index, len(row.new_token_ids), row.num_steps, seconds))


@dataclass(frozen=True, slots=True)
class ReplayFigure:
    """One way to draft, on the same batches as the other ways. The recording of graphs is in none of the times."""

    HEADER: ClassVar = (
        "drafts", "file", "rows", "live rows", "samples", "tau", "nodes/step", "step ms", "device ms", "idle us",
        "host %", "tokens/s", "speed-up", "first, last row s",
    )  # fmt: skip

    drafts: str
    file: str
    rows: int
    samples: int
    num_tokens: int
    num_steps: int  # of all live rows together
    tau: float  # tokens per row and step, the one after the draft included
    nodes_per_step: float  # of all rows together
    step_seconds: float
    device_seconds: float | None  # per step
    host_share: float  # of a step's time, what the host does outside launch and wait
    tokens_per_second: float
    speedup: float | None  # over this engine without drafts
    recording_seconds: float
    finishes: tuple[tuple[Finish, ...], ...]  # per batch

    @property
    def live_rows(self) -> float:
        """On average over steps: rows end when their recordings do, and no other row takes their place."""
        return self.num_tokens / self.tau / self.num_steps

    @property
    def idle(self) -> float | None:
        """Seconds per step in which no step runs on the device; the best tokens of the step before may be ranked."""
        return None if self.device_seconds is None else self.step_seconds - self.device_seconds

    def cells(self) -> tuple[object, ...]:
        seconds = [finish.seconds for finish in self.finishes[0]]
        return (
            self.drafts, self.file, self.rows, f"{self.live_rows:.1f}", self.samples, self.tau, self.nodes_per_step,
            1e3 * self.step_seconds,
            None if self.device_seconds is None else 1e3 * self.device_seconds,
            None if self.idle is None else 1e6 * self.idle,
            100 * self.host_share, self.tokens_per_second, self.speedup, f"{min(seconds):.2f}, {max(seconds):.2f}",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReplaySizes:
    """`rows` per batch; at most `batches` batches of a problem's samples; `warm_up` tokens of a first problem;
    `fixed_nodes` of all rows together."""

    rows: tuple[int, ...]
    batches: int
    warm_up: int
    fixed_nodes: int


FULL = ReplaySizes(rows=(1, 4, 8, 16, 64), batches=4, warm_up=256, fixed_nodes=80)
SMOKE = ReplaySizes(rows=(2,), batches=1, warm_up=1, fixed_nodes=3)


class ReplayBench:
    """`families`: recordings by file name, of two or more problems each; the first problem warms up."""

    def __init__(self, bench: BenchModel, sizes: ReplaySizes, families: Mapping[str, Sequence[Recording]]):
        self.bench, self.sizes = bench, sizes
        self.families = families
        self.end_token = free_token([r for family in families.values() for r in family], bench.shape.vocabulary)
        for name, recordings in families.items():
            check_family(name, recordings)

    def measurements(self, costs: CostTable) -> Iterator[Measurement]:
        """costs: by which drafts end where they do not pay."""
        for name, recordings in self.families.items():
            length = max(len(recording.prompt) + len(recording.tokens) for recording in recordings)
            for rows in self.sizes.rows:
                samples = min(counts_by_problem(recordings).values())
                obstacle = f"a problem has {samples} samples only" if samples < rows else None
                work = partial(self.figures, name, rows, costs)
                yield Measurement(f"replay, {name}, {rows} rows", work, obstacle or self.bench.obstacle(rows, length))

    def figures(self, name: str, rows: int, costs: CostTable) -> list[ReplayFigure]:
        """Without drafts, with a fixed number of nodes, and with as many as the measured costs say."""
        engine, recordings = ReplayEngine(self.bench.engine), self.families[name]
        second = first_of_second(recordings)
        warm_up = [shortened(recording, self.sizes.warm_up) for recording in recordings[:second]]
        most = min(cost.most_tokens for cost in costs.costs) - rows
        nodes = self.sizes.fixed_nodes
        arms = {
            PLAIN: None,
            FIXED.format(nodes): TokenDrafter(BlendedLookup(), budget=nodes, kind="deterministic"),
            MEASURED: TokenDrafter(BlendedLookup(), budget=most, costs=costs, kind="deterministic"),
        }
        figures: list[ReplayFigure] = []
        for arm, drafter in arms.items():
            engine.drafter = drafter or engine.drafter
            self._replay(engine, batches_of(warm_up, rows, 1), draft=drafter is not None)
            batches = batches_of(recordings[second:], rows, self.sizes.batches)
            stats, finishes, device, recording = self._replay(engine, batches, draft=drafter is not None)
            plain = figures[0].tokens_per_second if figures else None
            figures.append(_figure(arm, name, rows, stats, finishes, device, recording, plain))
        return figures

    def _replay(
        self, engine: ReplayEngine, batches: list[list[Recording]], *, draft: bool
    ) -> tuple[Stats, list[tuple[Finish, ...]], float | None, float]:
        """Sums over the batches: statistics, ends of rows, seconds on the device, seconds of recording."""
        stats, finishes, problem = Stats(), [], None
        before = 0.0 if engine.step is None else engine.step.recording_seconds
        if engine.step is not None:
            engine.step.device_seconds()  # what came before is not asked for
        for batch in batches:
            if batch[0].problem != problem:
                engine.drafter.lookup = BlendedLookup()
                problem = batch[0].problem
            stats += engine.replay(batch, end_token=self.end_token, draft=draft).stats
            finishes.append(tuple(engine.finishes))
        return stats, finishes, engine.step.device_seconds(), engine.step.recording_seconds - before


def _figure(
    arm: str,
    name: str,
    rows: int,
    stats: Stats,
    finishes: list[tuple[Finish, ...]],
    device: float | None,
    recording: float,
    plain: float | None,
) -> ReplayFigure:
    total = stats.wall_seconds - stats.prefill_seconds - recording
    rate = stats.num_tokens / total
    return ReplayFigure(
        drafts=arm,
        file=name,
        rows=rows,
        samples=sum(map(len, finishes)),
        num_tokens=stats.num_tokens,
        num_steps=stats.num_forwards,
        tau=stats.mean_acceptance_length,
        nodes_per_step=stats.num_draft_tokens / stats.num_forwards,
        step_seconds=total / stats.num_forwards,
        device_seconds=None if device is None else device / stats.num_forwards,
        host_share=1 - stats.seconds["forward"] / total,
        tokens_per_second=rate,
        speedup=None if plain is None else rate / plain,
        recording_seconds=recording,
        finishes=tuple(finishes),
    )


def batches_of(recordings: Sequence[Recording], rows: int, most: int) -> list[list[Recording]]:
    """Full batches of samples of one problem each, at most `most` per problem."""
    return [
        samples[first : first + rows]
        for samples in by_problem(recordings)
        for first in range(0, len(samples) - rows + 1, rows)[:most]
    ]


def shortened(recording: Recording, count: int) -> Recording:
    return Recording(recording.problem, recording.sample, recording.prompt, recording.tokens[:count])


def counts_by_problem(recordings: Sequence[Recording]) -> dict[int, int]:
    problems = [recording.problem for recording in recordings]
    return {problem: problems.count(problem) for problem in problems}


def first_of_second(recordings: Sequence[Recording]) -> int:
    """Place of the first recording of the second problem; the number of recordings where there is none."""
    return next((i for i, r in enumerate(recordings) if r.problem != recordings[0].problem), len(recordings))


def check_family(name: str, recordings: Sequence[Recording]) -> None:
    """Raises ValueError where a replay would not start."""
    if first_of_second(recordings) == len(recordings):
        raise ValueError(f"{name} must hold two problems or more, got one; the first one warms up")
    if not all(len(recording.prompt) for recording in recordings):
        raise ValueError(f"{name} must hold every problem's text, got an empty prompt; add the field `problem`")


def free_token(recordings: Sequence[Recording], vocabulary: int) -> int:
    """The highest token id that no recording uses. Raises ValueError where ids lie beyond the vocabulary."""
    used = set(np.concatenate([part for r in recordings for part in (r.prompt, r.tokens)]).tolist())
    if max(used) >= vocabulary:
        raise ValueError(
            f"recorded tokens must be below the shape's vocabulary of {vocabulary}, got {max(used)}; "
            "use the tokenizer that belongs to the shape"
        )
    return next(token for token in range(vocabulary - 1, -1, -1) if token not in used)


def made_up_recordings(vocabulary: int, *, tokens: int) -> list[Recording]:
    """Two problems with two samples each that repeat themselves: for smoke runs."""
    pattern = np.arange(3, dtype=np.int32) + vocabulary // 2
    prompt = np.concatenate([pattern, pattern])
    return [
        Recording(problem, sample, prompt + problem, np.resize(pattern, tokens + sample) + problem)
        for problem in range(2)
        for sample in range(2)
    ]
