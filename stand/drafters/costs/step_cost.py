"""What a step costs by the tokens it holds: measured once on the real model, then the drafts' budget follows from it.

A node that is accepted with probability p adds p tokens. With T expected tokens and a step of C(M) seconds for M
tokens, one more node pays while p / T > (C(M + 1) - C(M)) / C(M): the marginal rule for the most tokens per second.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from os import PathLike
from pathlib import Path

import numpy as np

from stand.measured_files import measured_path
from stand.simd.threads import parallel_region
from stand.trees import DraftBatch, DraftTree

FORMAT = "stand cost table 1"
MOST_PER_ROW = 256  # tokens per row of the largest step that is timed, besides `most_tokens` in all
REPEATS = 7
BRIEF_RATIO = 8.0  # a step that costs more than so many of the smallest one never pays
NEAR_RATIO = 3.0  # steps up to so many of the smallest one are run most, so they are timed best
JUMP = 1.05  # times: less is noise, or not worth a plan
FAR_APART = 7919  # numbers between tokens that follow each other: a prime, so that few vocabularies are its multiples
LONGEST_TICK = 1e-4  # seconds of a clock that times steps. Processor time in gVisor has ticks of 10 ms
BRIEF_STEPS = 16  # so many of the smallest one a brief measurement may take, however long one is


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step with tokens[i] packed tokens of `num_rows` rows behind `length` committed ones each."""

    num_rows: int
    length: int
    tokens: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]  # not falling

    def __post_init__(self) -> None:
        for name in ("tokens", "seconds"):  # lists and arrays, too: a cost is a key where drafts are made
            values = getattr(self, name)
            if not isinstance(values, (tuple, list, np.ndarray)):
                raise ValueError(f"{name} of a step cost must be a tuple, got {values!r:.40}; give one entry per size")
            object.__setattr__(self, name, tuple(values))
        counts = self.num_rows, self.length, *self.tokens
        are_whole = (isinstance(count, (int, np.integer)) and not isinstance(count, bool) for count in counts)
        if not (all(are_whole) and all(abs(count) < 2**31 for count in counts)):
            raise ValueError(
                "num_rows, length and tokens of a step cost must be whole numbers below 2**31, got "
                f"{self.num_rows!r:.40}, {self.length!r:.40} and {self.tokens!r:.80}; measure by engine.measure_cost()"
            )
        if not all(isinstance(time, (int, float, np.floating)) and time < 2**64 for time in self.seconds):  # nor NaN
            raise ValueError(
                f"seconds of a step cost must be numbers below 2**64, got {self.seconds!r:.80}; leave out sizes that "
                "never pay"
            )
        rising = np.all(np.diff(self.tokens) > 0) and np.all(np.diff(self.seconds) >= 0)
        if len(self.tokens) < 2 or len(self.tokens) != len(self.seconds) or not rising or min(self.seconds) <= 0:
            raise ValueError(
                "a step cost needs two or more sizes, ascending, with times above 0 that do not fall, got "
                f"{self.tokens} and {self.seconds}; measure with engine.measure_cost()"
            )
        if self.num_rows < 1 or self.length < 0 or self.tokens[0] < 1:
            raise ValueError(
                "a step cost must be of one row or more behind 0 tokens or more and of 1 token or more, got "
                f"{self.num_rows}, {self.length} and {self.tokens[0]}; measure with engine.measure_cost()"
            )
        for name in ("num_rows", "length"):
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "tokens", tuple(map(int, self.tokens)))  # files hold no numbers of numpy's
        object.__setattr__(self, "seconds", tuple(map(float, self.seconds)))

    def knee(self, ratio: float) -> int:
        """The most tokens, of those timed, whose step costs at most `ratio` times the smallest one."""
        return max(
            size for size, time in zip(self.tokens, self.seconds, strict=True) if time <= ratio * self.seconds[0]
        )

    @property
    def most_tokens(self) -> int:
        """The largest step that was timed: a budget never goes beyond."""
        return self.tokens[-1]

    def rises(self, num_rows: int, budget: int, padded: Sequence[int] = ()) -> np.ndarray:
        """[budget] float32: by what share of itself a step of `num_rows` tokens and k nodes rises with node k + 1.

        Of the convex curve below the timings: a jump, such as to the next tile of a matrix product, is shared out over
        the nodes that it makes room for, so that growth does not end in front of it. Where steps are `padded` to sizes,
        it is to end there: see `_rises_at_sizes`.
        """
        if padded:
            return self._rises_at_sizes(num_rows, budget, padded)
        corners = _convex_below(self.tokens, self.seconds)
        sizes = np.arange(num_rows, num_rows + budget + 1)
        seconds = np.interp(
            sizes, [self.tokens[place] for place in corners], [self.seconds[place] for place in corners]
        )
        return (np.diff(seconds) / seconds[:-1]).astype(np.float32)

    def jumps(self, num_rows: int, budget: int) -> np.ndarray | None:
        """[budget + 1] float64: seconds of a step of `num_rows` tokens and k nodes, as timed, for `best_size`; None
        where they lie nowhere more than JUMP above the curve that `rises` goes by, which then says all."""
        sizes = np.arange(num_rows, num_rows + budget + 1)
        seconds = np.interp(sizes, self.tokens, self.seconds)
        rises = np.log1p(self.rises(num_rows, budget).astype(np.float64))
        curve = seconds[0] * np.exp(np.cumsum(rises))  # from the first node on
        return seconds if (seconds[1:] > JUMP * curve).any() else None

    def _rises_at_sizes(self, num_rows: int, budget: int, padded: Sequence[int]) -> np.ndarray:
        """As in `rises`. What a size has room for is free once a step has begun it, and the first node beyond answers
        for the whole next size: it must be worth that size's rise over the nodes it adds, which are worth less than
        the first of them. Path probabilities fall about as the reciprocal of their rank."""
        rises = np.zeros(budget, dtype=np.float32)
        for size, larger in pairwise(size for size in padded if size >= num_rows):
            if size - num_rows < budget:
                seconds, more = np.interp([size, larger], self.tokens, self.seconds)
                share = math.log(larger / size) / (larger / size - 1)  # of the first node's worth, on average
                rises[size - num_rows] = (more - seconds) / seconds / ((larger - size) * share)
        return rises

    @classmethod
    def measured(cls, tokens: Sequence[int], seconds: Sequence[float], *, num_rows: int, length: int) -> StepCost:
        """From timings in any order; a time below that of a smaller step is noise and raised to it."""
        order = np.argsort(tokens)
        smooth = np.maximum.accumulate(np.asarray(seconds, dtype=float)[order])
        return cls(num_rows, length, tuple(int(tokens[place]) for place in order), tuple(smooth.tolist()))


@dataclass(frozen=True, slots=True)
class StepTimer:
    """`Engine.measure_cost`, and how the engine's steps run: times of one way say nothing of another's.

    way: the back end's name on a GPU, "" on a CPU; "unfused" is added where modules are as they were, and "sharded over
    2" where ranks hold parts of them. sizes: tokens, ascending, to which steps are padded; none where they are not.
    """

    run: Callable[..., StepCost]
    way: str = ""
    sizes: tuple[int, ...] = ()

    def __call__(self, **sizes: float) -> StepCost:
        return self.run(**sizes)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs with several numbers of rows and behind several context lengths; drafts go by the nearest one.

    Attention makes the same tokens dearer the longer the context is.

    Drafts made by a table are a function of it: with a saved one they repeat, seed by seed, where freshly measured
    ones differ from run to run. The law of the output does not depend on either.
    """

    costs: tuple[StepCost, ...]

    def __post_init__(self) -> None:
        if isinstance(self.costs, StepCost):
            raise ValueError("a cost table needs a sequence of step costs, got one by itself; write CostTable((cost,))")
        if not (isinstance(self.costs, (tuple, list)) and all(isinstance(cost, StepCost) for cost in self.costs)):
            raise ValueError(
                f"a cost table must hold step costs, got {self.costs!r:.80}; write CostTable((cost, ...)) of what "
                "engine.measure_cost() returns"
            )
        if not self.costs:
            raise ValueError("a cost table needs at least one step cost, got none; measure with engine.measure_cost()")
        object.__setattr__(self, "costs", tuple(self.costs))

    def at(self, length: float, *, num_rows: int = 1) -> StepCost:
        """The cost that was measured with the nearest number of rows, and of those at the nearest length, by ratio."""
        return min(
            self.costs,
            key=lambda cost: (abs(math.log(cost.num_rows / num_rows)), abs(math.log((cost.length + 1) / (length + 1)))),
        )

    @property
    def most_tokens(self) -> int:
        """The largest step that was timed."""
        return max(cost.most_tokens for cost in self.costs)

    def save(self, path: str | PathLike) -> None:
        document = {"format": FORMAT, "costs": [asdict(cost) for cost in self.costs]}
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.part{secrets.token_hex(4)}")
        try:
            unfinished.write_text(json.dumps(document) + "\n", encoding="utf-8")
            unfinished.replace(path)  # whoever is killed meanwhile leaves the old file
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | PathLike) -> CostTable:
        """Raises ValueError where the file is not a saved table."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise ValueError(f"unknown format {document['format']!r}")
            return cls(tuple(
                StepCost(cost["num_rows"], cost["length"], tuple(cost["tokens"]), tuple(cost["seconds"]))
                for cost in document["costs"]
            ))  # fmt: skip
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} must hold a saved cost table, got {error!r}; measure it again") from error


def best_size(planned: DraftBatch, seconds: np.ndarray) -> int:
    """Of a planned draft's nodes all, where they pay together, else as many of the likeliest as give the most tokens
    per second; 0 is a step without drafts. seconds: [nodes + 1] or longer, by their number.

    Growth by `rises` may end in the midst of a jump, which its nodes do not pay. Where they pay, though not the most,
    they stay: what is rejected teaches, too."""
    chances = np.sort(np.delete(planned.path_probabilities, planned.offsets[:-1]))[::-1]
    expected = len(planned) + np.append(0.0, np.cumsum(chances, dtype=np.float64))
    rates = expected / seconds[: len(expected)]
    return len(chances) if rates[-1] >= rates[0] else int(rates.argmax())


def table_path(folder: Path, *, model: str, device: str, dtype: str) -> Path:
    """Where the table of one model on one device is kept."""
    return measured_path(folder, model, device, dtype)


def _convex_below(sizes: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Indices of the corners of the largest convex curve that lies nowhere above the points (sizes ascend)."""
    corners: list[int] = []
    for place in range(len(sizes)):
        while len(corners) > 1:
            before, last = corners[-2:]
            if _slope(sizes, seconds, before, last) < _slope(sizes, seconds, before, place):
                break
            corners.pop()
        corners.append(place)
    return corners


def _slope(sizes: Sequence[int], seconds: Sequence[float], left: int, right: int) -> float:
    return (seconds[right] - seconds[left]) / (sizes[right] - sizes[left])


def clock_of(computes_elsewhere: bool) -> Callable[[], float]:
    """What times steps: the time of day where this thread waits for what computes them, else `processor_clock`."""
    return time.perf_counter if computes_elsewhere else processor_clock()


def processor_clock() -> Callable[[], float]:
    """The processor time of this thread, which other work on the machine does not lengthen; the time of day where that
    is told too coarsely, or torch's threads are not those of GNU's OpenMP.

    (With several of those it waits for the others busily, so that its time is theirs. While Apple's products are
    computed by threads of their own it may sleep.)
    """
    is_fine = min(_tick(time.thread_time) for _ in range(3)) < LONGEST_TICK
    return time.thread_time if is_fine and parallel_region() else time.perf_counter


def _tick(clock: Callable[[], float]) -> float:
    """By how much a clock goes on at once; infinite where it stands."""
    start, end = clock(), time.perf_counter() + 10 * LONGEST_TICK
    while (now := clock()) == start:
        if time.perf_counter() > end:
            return math.inf
    return now - start


def measure_cost(
    run_step: Callable[[DraftBatch], None],
    *,
    num_rows: int,
    length: int,
    most_tokens: int,
    vocab_size: int = 2,
    warms: bool = False,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCost:
    """The shortest times of whole steps (layout, forward, verdict), sizes in turn so that a slow moment meets them all:
    other work only adds. On a virtual machine with an H100 medians of seven steps of 7 ms varied by 0.4 ms.

    vocab_size: of the model; see `synthetic_drafts`. warms: a size's first step, which may record a graph, does not
    count, as it never does without `seconds`. seconds: see `_measure_briefly`; clock: `clock_of` the steps.
    """
    seen: set[int] = set()
    warms = warms or seconds is None

    def timed(size: int) -> float:
        batch = synthetic_drafts(size, num_rows, vocab_size)
        if warms and size not in seen:
            seen.add(size)
            run_step(batch)
        start = clock()
        run_step(batch)
        return clock() - start

    if seconds is not None:
        times = _measure_briefly(timed, num_rows, most_tokens, seconds)
        return StepCost.measured(list(times), list(times.values()), num_rows=num_rows, length=length)
    sizes = _sizes(num_rows, most_tokens)
    timings: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(REPEATS):
        for size in sizes:
            timings[size].append(timed(size))
    shortest = [min(timings[size]) for size in sizes]
    return StepCost.measured(sizes, shortest, num_rows=num_rows, length=length)


def _sizes(num_rows: int, most_tokens: int) -> list[int]:
    """From one token per row on, two per doubling: between them a cost is a straight line, and it bends where a matrix
    product takes another tile."""
    per_row = [1 << power for power in range(MOST_PER_ROW.bit_length())]
    sizes = {num_rows * size for size in per_row} | {3 * num_rows * size // 2 for size in per_row[:-1]}
    return sorted({size for size in sizes if size < most_tokens} | {most_tokens})


def _measure_briefly(
    timed: Callable[[int], float], num_rows: int, most_tokens: int, seconds: float
) -> dict[int, float]:
    """Seconds by size, within about `seconds` in all, or BRIEF_STEPS of the smallest steps where these take longer. The
    shortest of a size's runs counts: other work only adds.

    First one pass over sizes that double, as far as BRIEF_RATIO and the time allow. Then, in turn, those that cost up
    to NEAR_RATIO, and the sizes between them.
    """
    spent = timed(num_rows)  # loads weights, compiles
    times: dict[int, float] = {}
    size, last = num_rows, 0.0
    while size <= most_tokens and (len(times) < 2 or spent + 2 * last <= seconds):
        dear = BRIEF_RATIO / 2 * times.get(num_rows, math.inf)  # the next size may cost twice as much
        last = timed(size)
        spent += last
        if size == num_rows:
            seconds = max(seconds, BRIEF_STEPS * last)
        if last > dear and spent + last <= seconds:  # or it was a busy moment
            again = timed(size)
            last, spent = min(last, again), spent + again
        times[size] = last
        if last > dear:
            break
        size = 2 * size if len(times) > 1 else min(2 * size, max(size + 1, most_tokens))  # two sizes in any case
    near = [size for size in times if times[size] <= NEAR_RATIO * times[num_rows]]
    wanted = [size for size in _sizes(num_rows, most_tokens) if size <= near[-1]]
    while True:
        for size in wanted:
            upper = min(times[larger] for larger in times if larger >= size)
            if spent + upper > seconds:
                return times
            last = timed(size)
            times[size], spent = min(times.get(size, math.inf), last), spent + last


def synthetic_drafts(num_tokens: int, num_rows: int, vocab_size: int = 2) -> DraftBatch:
    """`num_tokens` in all, shared out evenly, in trees of two branches.

    Tokens come from all over the vocabulary: in a mixture of experts, tokens that are alike would go to the same few
    experts, and a step with many of them would look as cheap as one with two. Those that follow each other differ.
    """
    shares = [num_tokens // num_rows + (row < num_tokens % num_rows) for row in range(num_rows)]
    stride = 1 if vocab_size % FAR_APART == 0 else FAR_APART
    tokens = (np.arange(num_tokens) * stride % vocab_size).astype(np.int32)
    return DraftBatch.concatenate([DraftTree.branching(own, 2) for own in np.split(tokens, np.cumsum(shares[:-1]))])
