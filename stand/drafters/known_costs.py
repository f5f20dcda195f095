"""What steps cost on this machine, timed on first use, kept in a file and followed while steps run.

Two tables per number of rows. The *filed* one is timed once and kept: it never changes while its file stands. The
*followed* one starts from it and takes the times of the steps that run anyway, so that another load or a longer context
is followed. Calls that were given a seed draft by the filed one, so that they can be repeated; the others by the
followed one. That also keeps the law: the followed table depends on what earlier calls decoded, and a call with the
seed of an earlier one must not draft by it (stand/seeds.py).
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

import stand
from stand.drafters.step_cost import CostTable, StepCost, table_path
from stand.forward.model import size_name
from stand.measured_files import VARIABLE, keep_first

MOST_ROWS = 256  # a call with more rows takes the table of so many
LENGTH = 32  # committed tokens of each row when steps are timed; longer contexts are followed
SECONDS = 1.5  # of processor time, for timing; what comes before takes less than half a second more
LARGEST_DOUBT = 0.15**2  # variance of the log by which a step rises from a size to the next, of a filed table
DRIFT = 0.002  # how far such a rise wanders in a step
NOISE = 0.1  # of the log of a step's time, before any was seen
NOISE_RATE = 0.01  # of what a surprise says about the noise
TAILS = 4.0  # degrees of freedom: a surprise twice as large as expected counts half
STEPS_BETWEEN = 16  # the followed table that drafts see changes once in so many steps

_IN_MEMORY: dict[Path, StepCost] = {}  # filed ones of this process, also where no file can be written

Measure = Callable[..., StepCost]  # `Engine.measure_cost`


class KnownCosts:
    """The tables of one model here, for the numbers of rows that `prepare` was told.

    folder: of the files. A file is named by model type and sizes, processor, torch's version and this project's,
    dtype, threads and rows.
    """

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self._name, self._dtype, self._folder = size_name(model), str(model.dtype), folder
        self._filed: dict[int, StepCost] = {}
        self._followed: dict[int, FollowedCost] = {}

    def prepare(self, num_rows: int, measure: Measure) -> None:
        """Have a table for calls of `num_rows` rows: from this process, its file, or by `measure`."""
        size = _size_class(num_rows)
        if size not in self._filed:
            self._filed[size] = self._find(size, measure)
            self._followed[size] = FollowedCost(self._filed[size])

    def cost(self, num_rows: int, *, is_seeded: bool) -> StepCost:
        """Of the smallest number of rows that was prepared and is no smaller than `num_rows`, else of the largest."""
        size = self._nearest(num_rows)
        return self._filed[size] if is_seeded else self._followed[size].cost

    def most_tokens(self, num_rows: int) -> int:
        """Of a step that `cost` tells of, now and later."""
        return self._filed[self._nearest(num_rows)].most_tokens

    def record(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step with `num_tokens` tokens of `num_rows` rows took so long."""
        self._followed[self._nearest(num_rows)].record(num_tokens, seconds)

    def path(self, num_rows: int) -> Path:
        """The file for calls of `num_rows` rows. Without it their steps are timed anew, by the next process."""
        builds = f"torch {torch.__version__} stand {stand.__version__}"
        where = f"{processor_name()} {builds} {torch.get_num_threads()} threads {_size_class(num_rows)} rows"
        return table_path(self._folder, model=self._name, device=where, dtype=self._dtype)

    def _nearest(self, num_rows: int) -> int:
        return min((size for size in self._filed if size >= num_rows), default=max(self._filed))

    def _find(self, size: int, measure: Measure) -> StepCost:
        path = self.path(size)
        if path not in _IN_MEMORY:
            _IN_MEMORY[path] = _read(path) or _file(path, measure(num_rows=size, length=LENGTH, seconds=SECONDS))
        return _IN_MEMORY[path]


class FollowedCost:
    """A step cost that follows the times of running steps, in its ratios, which alone decide about drafts.

    Each step is compared with the one before: what made both longer, such as a load that slows all work, says nothing.
    The log of the ratio of their times is a noisy sum of the rises between the sizes that lie between them, which a
    Kalman filter learns: fast while they are doubtful, by less and less as steps agree. Each rise begins as it was
    filed and drifts. A surprise that the noise does not explain counts less the larger it is: a busy moment moves
    little.
    """

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost  # what drafts see
        self._rises = np.diff(np.log(np.array(cost.seconds)))  # [sizes - 1], from each size to the next, in logs
        self._covariance = np.diag(np.full(len(self._rises), LARGEST_DOUBT))  # of the errors in them
        self._doubts = np.einsum("ii->i", self._covariance)  # a view of its diagonal
        self._noise = 2 * NOISE**2  # variance of the log of two steps' ratio
        self._passed: dict[int, np.ndarray] = {}  # by a step's tokens, shares of the rises that lie below it
        self._before: tuple[np.ndarray, float] | None = None  # the last step's, and the log of its time
        self._num_steps = 0

    def record(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long; larger ones than the largest size count as that."""
        passed = self._passed.get(num_tokens)
        if passed is None:
            place = np.interp(num_tokens, self.cost.tokens, np.arange(len(self.cost.tokens)))
            passed = self._passed[num_tokens] = np.clip(place - np.arange(len(self._rises)), 0.0, 1.0)
        time = math.log(max(seconds, 1e-9))
        if self._before is not None:
            self._learn(passed - self._before[0], time - self._before[1])
        self._before = passed, time
        self._num_steps += 1
        if self._num_steps % STEPS_BETWEEN == 0:
            times = self.cost.seconds[0] * np.exp(np.append(0.0, np.cumsum(self._rises)))
            self.cost = StepCost.measured(self.cost.tokens, times, num_rows=self.cost.num_rows, length=self.cost.length)

    def _learn(self, apart: np.ndarray, change: float) -> None:
        """Two steps that lie `apart` rises from each other differed by `change`, in logs."""
        shared = self._covariance @ apart
        variance = float(apart @ shared) + self._noise
        surprise = change - float(apart @ self._rises)
        gain = shared / (variance + surprise**2 / TAILS)
        self._rises += surprise * gain
        self._covariance -= gain[:, None] * shared
        self._doubts += np.minimum(DRIFT**2, LARGEST_DOUBT - self._doubts)
        self._noise += NOISE_RATE * (min(surprise**2, TAILS * self._noise) - self._noise)


def processor_name() -> str:
    """The model of this machine's processor, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _size_class(num_rows: int) -> int:
    """The power of two at or above `num_rows`, at most MOST_ROWS."""
    return min(1 << max(num_rows - 1, 0).bit_length(), MOST_ROWS)


def _read(path: Path) -> StepCost | None:
    """The cost in a file; None where there is none, or a damaged one."""
    try:
        return CostTable.load(path).costs[0]
    except (OSError, ValueError):
        return None


def _file(path: Path, cost: StepCost) -> StepCost:
    """Keep what was timed, and say so; what another process kept meanwhile goes first.

    Without a folder that can be written it holds for this process.
    """
    kept = f"kept in {path}"
    try:
        keep_first(path, CostTable((cost,)).save, is_sound=lambda known: _read(known) is not None)
        cost = _read(path) or cost
    except OSError as error:
        kept = f"kept for this process only, as {path} cannot be written ({error.strerror})"
    logging.getLogger("stand").warning(
        "timed steps of %d rows, so that drafts are made where they pay; %s (budget= or costs= of BlendedDrafter, "
        "or %s=off, do without)", cost.num_rows, kept, VARIABLE,
    )  # fmt: skip
    return cost
