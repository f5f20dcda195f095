"""What steps cost on this machine, timed on first use, kept in a file and followed while steps run.

Two tables per number of rows. The *filed* one is timed once and kept: it never changes while its file stands. The
*followed* one starts from it and takes the times of the steps that run anyway, so that another load or a longer context
is followed. Calls that were given a seed draft by the filed one, so that they can be repeated; the others by the
followed one. That also keeps the law: the followed table depends on what earlier calls decoded, and a call with the
seed of an earlier one must not draft by it (stand/seeds.py).
"""

from __future__ import annotations

import logging
import platform
from pathlib import Path

import torch
from transformers import PreTrainedModel

import stand
from stand.drafters.costs.followed import FollowedCost
from stand.drafters.costs.step_cost import CostTable, StepCost, StepTimer, table_path
from stand.forward.devices import input_device, is_nvidia
from stand.forward.few_tokens.product import INSTRUCTION_SET
from stand.forward.model import size_name
from stand.measured_files import VARIABLE, keep_first
from stand.trees.system_program import kernel_value

MOST_TIMED_ROWS = 256  # a call with more rows takes the table of so many
SHARED_SIZES = (64, 16, 4, 1)  # rows end: every call has the tables of these numbers of rows below its own
LENGTH = 32  # committed tokens of each row when steps are timed; longer contexts are followed
SECONDS = 1.5  # for timing (more where steps are long); what comes before takes half a second more on a CPU

LOGGER = logging.getLogger("stand")
_IN_MEMORY: dict[Path, StepCost] = {}  # filed ones of this process, also where no file can be written


class KnownCosts:
    """The tables of one model here, for the numbers of rows that `prepare` was told.

    folder: of the files. A file is named by model type, sizes and bytes of weights, torch's version and this project's,
    dtype, rows, how steps run (`StepTimer.way`), and the GPU, or the processor, its instruction set (those of one name
    may differ) and threads.
    """

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self._name, self._dtype, self._folder = size_name(model), str(model.dtype), folder
        self._device = input_device(model)
        self._way = ""  # how steps ran that the tables are of
        self._filed: dict[int, StepCost] = {}
        self._followed: dict[int, FollowedCost] = {}

    def prepare(self, num_rows: int, measure: StepTimer) -> None:
        """Have the tables of a call of `num_rows` rows: from this process, their files, or by `measure`."""
        way = getattr(measure, "way", "")  # a drafter of one's own may hand on a function
        if way != self._way:
            self._way, self._filed, self._followed = way, {}, {}
        for size in _size_classes(num_rows):
            if size not in self._filed:
                self._filed[size] = self._find(size, measure)
                self._followed[size] = FollowedCost(self._filed[size])

    def seeded_cost(self, num_rows: int, most_rows: int) -> StepCost:
        """Cost of a step of `num_rows` rows in a call of `most_rows` (0: not known). It does not depend on what else
        was prepared if `most_rows` is known, unless a call whose steps run another way has begun since."""
        sizes = _size_classes(most_rows or self._nearest(num_rows))
        own = min((size for size in sizes if size >= num_rows), default=max(sizes))
        return self._filed[own if own in self._filed else self._nearest(num_rows)]

    def followed_cost(self, num_rows: int) -> StepCost:
        """Of the smallest number of rows that was prepared and is no smaller than `num_rows`, else of the largest."""
        return self._followed[self._nearest(num_rows)].cost

    def most_tokens(self, num_rows: int) -> int:
        """Of a step that either cost tells of, now and later."""
        farthest = min((size for size in SHARED_SIZES if size >= num_rows), default=MOST_TIMED_ROWS)
        sizes = [size for size in self._filed if num_rows <= size <= farthest] or [self._nearest(num_rows)]
        return max(self._filed[size].most_tokens for size in sizes)

    def record(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step with `num_tokens` tokens of `num_rows` rows took so long."""
        self._followed[self._nearest(num_rows)].record(num_tokens, seconds)

    def path(self, num_rows: int, way: str = "") -> Path:
        """The file for calls of `num_rows` rows. Without it their steps are timed anew, by the next process."""
        builds, rows = f"torch {torch.__version__} stand {stand.__version__}", f"{_size_class(num_rows)} rows"
        if self._device.type in ("cuda", "xpu"):
            where = f"{gpu_name(self._device)} {way} {builds} {rows}"
        else:
            threads = f"{torch.get_num_threads()} threads"
            where = f"{processor_name()} {way} {INSTRUCTION_SET} {builds} {threads} {rows}"
        return table_path(self._folder, model=self._name, device=where, dtype=self._dtype)

    def _nearest(self, num_rows: int) -> int:
        return min((size for size in self._filed if size >= num_rows), default=max(self._filed))

    def _find(self, size: int, measure: StepTimer) -> StepCost:
        path = self.path(size, self._way)
        if path not in _IN_MEMORY:
            cost = _read(path) or _file(path, measure(num_rows=size, length=LENGTH, seconds=SECONDS))
            _IN_MEMORY.setdefault(path, cost)  # another thread may have timed it meanwhile
        return _IN_MEMORY[path]


def saved_costs(model: PreTrainedModel, folder: Path) -> CostTable | None:
    """The table that scripts/gpu_bench.py measured for such a model on this GPU; None where there is none, or one that
    is damaged or may not be read, and always elsewhere."""
    if not is_nvidia(model.device):
        return None
    device = torch.cuda.get_device_name(model.device)
    path = table_path(folder, model=size_name(model), device=device, dtype=str(model.dtype))
    try:
        return CostTable.load(path) if path.exists() else None
    except (OSError, ValueError) as error:
        LOGGER.warning("no costs of steps are known: %s", error)
        return None


def gpu_name(device: torch.device) -> str:
    """Of a GPU of NVIDIA, AMD or Intel. Some drivers call all of AMD's alike, so more is told of those."""
    name = torch.get_device_module(device).get_device_name(device)
    if device.type != "cuda" or is_nvidia(device):
        return name
    properties = torch.cuda.get_device_properties(device)
    return f"{name} {properties.gcnArchName} {properties.multi_processor_count} processors"


def processor_name() -> str:
    """The model of this machine's processor, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else kernel_value("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def _size_class(num_rows: int) -> int:
    """The power of two at or above `num_rows`, at most MOST_TIMED_ROWS."""
    return min(1 << max(num_rows - 1, 0).bit_length(), MOST_TIMED_ROWS)


def _size_classes(most_rows: int) -> list[int]:
    """Numbers of rows that a call of `most_rows` has tables for: its own, and those below that calls share."""
    own = _size_class(most_rows)
    return [own, *(size for size in SHARED_SIZES if size < own)]


def _read(path: Path) -> StepCost | None:
    """The cost in a file; None where there is none, or a damaged one."""
    try:
        return CostTable.load(path).costs[0]
    except (OSError, ValueError, RecursionError):
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
    LOGGER.warning(
        "timed steps of %d row%s, so that drafts are made where they pay; %s (budget= or costs= of BlendedDrafter, "
        "or %s=off, do without)", cost.num_rows, "" if cost.num_rows == 1 else "s", kept, VARIABLE,
    )  # fmt: skip
    return cost
