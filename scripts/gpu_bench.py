"""What a GPU makes of decoding steps and their parts, and how far each is from what the hardware allows.

    python scripts/gpu_bench.py --output bench.json              # the whole list, Qwen2.5-7B's shape, bfloat16
    python scripts/gpu_bench.py --replay FILE... --tokenizer tokenizer.json --output bench.json
    python scripts/gpu_bench.py --shapes qwen2.5-14b,qwen3-8b --parts products,attention
    python scripts/gpu_bench.py --device cpu --smoke             # tiny sizes in Triton's interpreter: does it run?

Random weights, nothing is downloaded. Every part runs in a process of its own under a time limit, in this order:

- `contact`: `gpu_first_contact.py`, does every piece run; what it prints is kept; once, however many shapes;
- `products`, `laws`: matrix products and the kernels from logits to the kept path, one by one;
- `checks`: greedy tokens against generate in float32, best tokens and margins in the model's type, kernels against the
  host's rules;
- `steps`: captured steps by rows, context length and nodes, and the cost table that `stand.wrap` reads, with its knees;
- `profile`: `profile_step.py`, where a step's time goes, kernel by kernel; what it prints is kept;
- `attention`: the kernel beside masked attention;
- `decoding`: this engine without drafts, also with top_p, not fused and with backend="sdpa", and generate eager;
- `replay`: recorded trajectories (`--replay`, JSONL as in `scripts/replay.py`) as rows of a batch: tokens per step and
  speed-up over this engine without drafts, under temperature 0.6 and top_p 0.95;
- `compiled`: generate with a static cache and torch.compile.

After `--minutes` nothing new begins, and what was left out is said; nor does a part whose process would be over before
its first figure. With `--together` the parts that need a model share one process: that saves the time of starting it
and of wrapping the model, and what kills it takes them all. `--output` is begun anew and complete at any time.
What runs writes to a file beside it, such as bench.qwen2.5-7b.steps.json, which an abrupt end leaves there; a later run
of other parts takes it in, if device, type and versions are the same. Where a command's time is limited, give each some
`--parts` and an `--output` of its own.
Progress goes to stderr, tables to stdout; without `--output` the last stdout line is the document.
A smoke run prints no table: the times of an interpreter mean nothing. Exit status: 0, 1 where a measurement failed or a
check that must hold did not, 2 where the run was refused.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import measuring.interruption  # noqa: F401  (before what loads slowly)
import torch
from gpu_parts.bench_record import BenchRecord, Budget, Figure, Measurement
from gpu_parts.device_option import cpu_or_gpu
from gpu_parts.part_process import PartRun, differing_settings, left_in
from gpu_parts.part_process import run_part as run_part_process
from gpu_parts.plain_float32 import use_plain_float32
from gpu_parts.versions import versions
from measuring.text_table import format_table
from workloads.model_shapes import ALL_SHAPES, SMOKE_SHAPE, ModelShape

from stand.gpu.tuning.device_timer import device_name
from stand.measured_files import measured_folder

if TYPE_CHECKING:  # the kernels are imported once it is known whether they are to be interpreted
    from gpu_parts.bench_model import BenchModel
    from gpu_parts.decode_engines import DecodeBench
    from gpu_parts.kernel_bench import KernelBench
    from gpu_parts.step_bench import StepBench
    from workloads.recordings import Recording

LIMITS = {  # seconds of each part's process, in the order of the parts
    "contact": 240, "products": 120, "laws": 120, "checks": 180, "steps": 240, "profile": 150, "attention": 180,
    "decoding": 300, "replay": 440, "compiled": 240,
}  # fmt: skip
PARTS = tuple(LIMITS)
SCRIPTS = {"contact": "gpu_first_contact.py", "profile": "profile_step.py"}  # parts that are commands of their own
MODEL_PARTS = ("checks", "steps", "decoding", "replay", "compiled")
LEAST_SECONDS = {**dict.fromkeys(PARTS, 25), **dict.fromkeys(MODEL_PARTS, 60)}  # before a part's first figure
SAME_SETTINGS = ("is_smoke", "device", "dtype", "versions")  # of figures that one document may hold
LAST_SECONDS = 20  # that what runs may take when the minutes are over
MARGIN = 15  # seconds: a part begins no measurement so shortly before its end, and says so by itself
STACKS = 5  # seconds before a process is killed: it says where it hangs
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SMOKE_NOTE = "smoke run in Triton's interpreter: the times below mean nothing"
MAX_POSITIONS = 40960
MAX_SMOKE_POSITIONS = 256
MINUTES = 28  # of half an hour
REPLAY_SAMPLES = 80  # of a problem; a few more than the largest batch, because short ones are skipped
SMOKE_TOKENS = 4  # of a made-up recording
SMOKE_CONTACT = "match"  # the piece of the first contact that a smoke run tries


class ShapeBench:
    """The parts of one model shape, each as tables of measurements by name; the model is made on first use."""

    def __init__(self, arguments: argparse.Namespace, shape: ModelShape):
        self.arguments, self.shape = arguments, shape
        self.device, self.dtype = torch.device(arguments.device), DTYPES[arguments.dtype]

    def tables(self, part: str) -> Iterator[tuple[str, Iterator[Measurement]]]:
        """Table names and what is to be measured for each, in order."""
        is_replayed = part == "replay" and bool(self.arguments.replay or self.arguments.smoke)
        has_costs = "steps" in self.arguments.parts or self.arguments.costs is not None
        if part == "steps":
            yield "costs", self.step_bench.cost_measurements()
        elif is_replayed and not has_costs:
            yield "costs", self.step_bench.cost_measurements(longest=self.arguments.replay_tokens)
        if part in {"attention", "products", "laws"}:
            yield part, getattr(self.kernels, part)()
        else:
            yield part, getattr(self, f"_{part}")()

    @cached_property
    def kernels(self) -> KernelBench:
        """Measures bandwidth and arithmetic rate when it is made."""
        from gpu_parts.kernel_bench import FULL, SMOKE, KernelBench

        extent = SMOKE if self.arguments.smoke else FULL
        return KernelBench(self.shape, extent, device=self.device, dtype=self.dtype)

    @cached_property
    def model(self) -> BenchModel:
        from gpu_parts.bench_model import BenchModel

        positions = MAX_SMOKE_POSITIONS if self.arguments.smoke else MAX_POSITIONS
        return BenchModel(self.shape, device=self.device, dtype=self.dtype, max_positions=positions)

    @cached_property
    def step_bench(self) -> StepBench:
        from gpu_parts.step_bench import FULL, SMOKE, StepBench

        from stand.drafters.costs.step_cost import CostTable

        bench = StepBench(
            self.model,
            SMOKE if self.arguments.smoke else FULL,
            bytes_per_second=self.kernels.machine.bytes_per_second,
            cost_folder=self.arguments.cost_folder,
        )
        if self.arguments.costs is not None:
            bench.costs += CostTable.load(self.arguments.costs).costs
        return bench

    def _checks(self) -> Iterator[Measurement]:
        from gpu_parts.gpu_checks import FULL, SMOKE, ChecksBench

        return ChecksBench(self.model, SMOKE if self.arguments.smoke else FULL).measurements()

    def _steps(self) -> Iterator[Measurement]:
        return self.step_bench.step_measurements()

    def _decoding(self) -> Iterator[Measurement]:
        return self._decode_bench().measurements()

    def _compiled(self) -> Iterator[Measurement]:
        return self._decode_bench().compiled_measurements()

    def _decode_bench(self) -> DecodeBench:
        from gpu_parts.decode_engines import FULL, SMOKE, DecodeBench

        sizes, rate = SMOKE if self.arguments.smoke else FULL, self.kernels.machine.bytes_per_second
        return DecodeBench(self.model, sizes, bytes_per_second=rate)

    def _replay(self) -> Iterator[Measurement]:
        from gpu_parts.trajectory_replay import FULL, SMOKE, ReplayBench

        from stand.drafters.costs.step_cost import CostTable

        families = read_families(self.arguments, self.shape.vocabulary)
        if not families:
            yield Measurement("replay", list, "no --replay FILE was given")
            return
        sizes = SMOKE if self.arguments.smoke else FULL
        yield from ReplayBench(self.model, sizes, families).measurements(CostTable(tuple(self.step_bench.costs)))


def read_families(arguments: argparse.Namespace, vocabulary: int) -> dict[str, list[Recording]]:
    """Recordings by file name; made-up ones in a smoke run. Raises ValueError for a file that holds none."""
    if arguments.smoke:
        from gpu_parts.trajectory_replay import made_up_recordings

        return {"made up": made_up_recordings(vocabulary, tokens=SMOKE_TOKENS)}
    from workloads.recordings import Selection, read_recordings, read_tokenizer

    if not arguments.replay:
        return {}
    tokenizer = read_tokenizer(arguments.tokenizer)
    selection = Selection(
        max_problems=1 + arguments.replay_problems, samples=REPLAY_SAMPLES, max_tokens=arguments.replay_tokens
    )  # fmt: skip
    return {path.name: read_recordings(path, tokenizer, selection) for path in arguments.replay}


def run_shape(arguments: argparse.Namespace, shape: ModelShape, record: BenchRecord, budget: Budget) -> None:
    """Everything asked for of one shape in this process, as far as the time goes."""
    bench = ShapeBench(arguments, shape)
    report(f"{shape.name}: bandwidth and arithmetic rate")
    machine = bench.kernels.machine
    record.note("machine", asdict(machine))
    show(
        arguments,
        f"{shape.name}, {arguments.dtype}: read {machine.bytes_per_second / 1e12:.2f} TB/s, "
        f"large matrix product {machine.flops_per_second / 1e12:.0f} TFLOP/s",
    )
    parts = [part for part in PARTS if part in arguments.parts and part not in SCRIPTS]
    if set(parts) & set(MODEL_PARTS) and not describe_model(arguments, bench, record):
        parts = [part for part in parts if part not in MODEL_PARTS]
    for part in parts:
        run_part(arguments, bench, part, record, budget)


def run_processes(arguments: argparse.Namespace, shape: ModelShape, record: BenchRecord, budget: Budget) -> None:
    """Every part asked for of one shape, each in a process of its own; of others, what a killed run has left."""
    with TemporaryDirectory() as folder:
        outputs = part_outputs(arguments.output or Path(folder) / "bench.json", shape)
        same = {name: record.document[name] for name in SAME_SETTINGS}
        for part in [part for part in PARTS if part not in arguments.parts]:
            if other := differing_settings(outputs[part], same):
                record.leave_out(part, f"{outputs[part].name} is of another {' and '.join(other)}; it stays there")
            else:
                take(part, left_in(outputs[part]), record)
        run_parts(arguments, shape, outputs, record, budget)


def part_outputs(output: Path, shape: ModelShape) -> dict[str, Path]:
    """By part: where its process writes until its end."""
    return {part: output.with_name(f"{output.stem}.{shape.name}.{part}.json") for part in PARTS}


def run_parts(
    arguments: argparse.Namespace, shape: ModelShape, outputs: dict[str, Path], record: BenchRecord, budget: Budget
) -> None:
    for parts in part_groups(arguments):
        name, left = ",".join(parts), 60 * (budget.minutes - budget.spent)
        if parts == ["replay"] and not (arguments.replay or arguments.smoke):
            record.leave_out(name, "no --replay FILE was given")
            continue
        if parts == ["contact"] and len(record.document["results"]) > 1:
            record.leave_out(name, "it is the same for every shape, and ran before the first one")
            continue
        if left < LEAST_SECONDS[parts[0]]:
            record.leave_out(name, f"{max(left, 0):.0f} seconds were left of {budget.minutes:g} minutes")
            continue
        report(f"{shape.name}: {name}")
        limit = min(sum(LIMITS[part] for part in parts), left + LAST_SECONDS)
        if name in SCRIPTS:
            start, fine = partial(script_command, name, script_options(arguments, shape, name, limit)), (0,)
        else:
            minutes, costs = min(left, max(limit - MARGIN, 1)) / 60, record.notes.get("cost_table")
            options = part_options(arguments, shape, name, minutes=minutes, costs=costs)
            start, fine = partial(part_command, options), (0, 1)
        run = run_part_process(start, outputs[parts[0]], limit=limit, fine=fine)
        take(name, run, record)
        if run.printed:
            show(arguments, run.printed)


def part_groups(arguments: argparse.Namespace) -> list[list[str]]:
    """Parts by the process that they run in, in order."""
    groups: list[list[str]] = []
    for part in [part for part in PARTS if part in arguments.parts]:
        if arguments.together and part in MODEL_PARTS and groups and groups[-1][-1] in MODEL_PARTS:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def take(part: str, run: PartRun, record: BenchRecord) -> None:
    """What came of a part into the record; of a command of its own what it printed, whatever came of it."""
    if run.result is not None:
        record.merge(run.result)
    elif run.printed and part in SCRIPTS:
        record.note(part, run.printed.splitlines())
    if run.failure is not None:
        lines = f"\n{run.last_errors}" if run.last_errors else ""
        record.fail(part, RuntimeError(f"{SCRIPTS.get(part, part)} did not end well: {run.failure}{lines}"))


def script_options(arguments: argparse.Namespace, shape: ModelShape, part: str, limit: float) -> list[str]:
    if part == "contact":
        options = ["--device", arguments.device, "--seconds", f"{max(limit - MARGIN, 1):.0f}"]
        options += ["--started", str(time.time())]
        pieces = SMOKE_CONTACT if arguments.smoke else arguments.pieces
        return [*options, *(["--only", pieces] if pieces is not None else [])]
    if arguments.smoke:
        return ["--smoke", "--repeats", "1"]
    return ["--shape", shape.name, "--device", arguments.device, "--dtype", arguments.dtype]


def part_options(
    arguments: argparse.Namespace, shape: ModelShape, part: str, *, minutes: float, costs: str | None
) -> list[str]:
    """What the process of a part, or of several with commas between, is started with, `--output` excepted."""
    options = ["--in-process", "--parts", part, "--minutes", f"{minutes:.3f}", "--started", str(time.time())]
    options += ["--device", arguments.device, "--dtype", arguments.dtype]
    options += ["--smoke"] if arguments.smoke else ["--shapes", shape.name]
    if arguments.cost_folder is not None:
        options += ["--cost-folder", str(arguments.cost_folder)]
    if "replay" in part.split(","):
        options += ["--costs", costs] if costs is not None else []
        options += ["--replay", *map(str, arguments.replay)] if arguments.replay else []
        options += ["--tokenizer", str(arguments.tokenizer)] if arguments.tokenizer is not None else []
        options += ["--replay-problems", str(arguments.replay_problems)]
        options += ["--replay-tokens", str(arguments.replay_tokens)]
    return options


def script_command(part: str, options: Sequence[str], output: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve().parent / SCRIPTS[part]), *options]


def part_command(options: Sequence[str], output: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), *options, "--output", str(output)]


def describe_model(arguments: argparse.Namespace, bench: ShapeBench, record: BenchRecord) -> bool:
    """Build the model and say which back end and which swaps it got; False where it cannot run the parts."""
    report(f"{bench.shape.name}: model and engine")
    try:
        backend, fusion = bench.model.engine.backend, bench.model.fusion_report()
    except Exception as error:  # Triton's errors derive from Exception alone
        record.fail("model", error)
        for part in [part for part in MODEL_PARTS if part in arguments.parts]:
            record.leave_out(part, "the model could not be made")
        return False
    record.note("backend", {"name": backend.name, "reason": backend.reason})
    record.note("fusion", fusion)
    show(arguments, "\n".join([f"back end {backend.name}: {backend.reason}", *(f"fusion: {line}" for line in fusion)]))
    return True


def run_part(arguments: argparse.Namespace, bench: ShapeBench, part: str, record: BenchRecord, budget: Budget) -> None:
    """All tables of a part; a part that cannot even begin is a failure of its own."""

    def announce(label: str) -> None:
        report(f"{bench.shape.name}: {label}")

    try:
        for name, measurements in bench.tables(part):
            figures: list[Figure] = []
            for more in record.run(name, measurements, budget, announce=announce):
                figures += more
                if name == "costs" and bench.step_bench.cost_path is not None:
                    record.note("cost_table", str(bench.step_bench.cost_path))
            if figures:
                show(arguments, format_table(figures[0].HEADER, [figure.cells() for figure in figures]))
    except Exception as error:  # whatever it is, the other parts are worth having
        record.fail(part, error)


def show_rest(arguments: argparse.Namespace, record: BenchRecord) -> None:
    """What is missing from the tables, and why."""
    rest = [(entry["measurement"], f"left out: {entry['reason']}") for entry in record.left_out]
    rest += [(entry["measurement"], f"failed: {entry['error']}") for entry in record.failed]
    for entry in record.failed:
        report(entry["traceback"])
    if rest:
        show(arguments, "\n".join(f"{name} {reason}" for name, reason in rest))


def run(arguments: argparse.Namespace) -> bool:
    """Whether nothing failed and every check held."""
    record = BenchRecord(settings(arguments), arguments.output)
    budget = Budget(arguments.minutes, started=arguments.started)
    if arguments.started is not None:  # what hangs says where, shortly before it is killed
        seconds = 60 * (budget.minutes - budget.spent) + MARGIN - STACKS
        faulthandler.dump_traceback_later(max(seconds, 1.0), file=sys.__stderr__)
    is_well = True
    for shape in [SMOKE_SHAPE] if arguments.smoke else [ALL_SHAPES[name] for name in arguments.shapes]:
        record.begin(asdict(shape))
        (run_shape if arguments.in_process else run_processes)(arguments, shape, record, budget)
        show_rest(arguments, record)
        is_well = is_well and not record.failed and all(check["holds"] for check in record.figures("checks"))
    if arguments.output is None:
        print(json.dumps(record.document))
    return is_well


def settings(arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "format": "stand gpu bench 1",
        "is_smoke": arguments.smoke,
        "note": SMOKE_NOTE if arguments.smoke else None,
        "device": device_name(torch.device(arguments.device)),
        "dtype": arguments.dtype,
        "minutes": arguments.minutes,
        "versions": versions(),
    }


def show(arguments: argparse.Namespace, text: str) -> None:
    """To stdout, except for the figures of a smoke run."""
    if not arguments.smoke:
        print(text + "\n", flush=True)


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def names_of(allowed: Sequence[str]):
    """An argument type: names with commas between, all of them in `allowed`."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(allowed):
            raise argparse.ArgumentTypeError(f"must be some of {', '.join(allowed)} with commas between, got {text!r}")
        return names

    return read


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes",
        type=names_of(ALL_SHAPES),
        default=["qwen2.5-7b"],
        metavar="NAME,...",
        help=f"models by shape: {', '.join(ALL_SHAPES)} (default: qwen2.5-7b)",
    )
    parser.add_argument(
        "--parts", type=names_of(PARTS), default=list(PARTS), metavar="PART,...", help="in this order (default: all)"
    )
    parser.add_argument("--device", type=cpu_or_gpu, default="cuda", help="of torch (%(default)s)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: float32 in a smoke run, else bfloat16")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after these nothing new begins (%(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file, complete after every measurement")
    parser.add_argument("--cost-folder", type=Path, help="default: where stand.wrap looks; of a smoke run, none")
    parser.add_argument("--replay", type=Path, nargs="+", default=[], metavar="FILE", help="recorded trajectories")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json for --replay")
    parser.add_argument(
        "--replay-problems",
        type=int,
        default=1,
        help="problems measured per file, after one more that comes first (%(default)s)",
    )
    parser.add_argument("--replay-tokens", type=int, default=1536, help="of every sample at most (%(default)s)")
    parser.add_argument("--costs", type=Path, help="cost table to replay with (default: measured)")
    parser.add_argument("--pieces", metavar="PIECE,...", help="of `contact`, as in gpu_first_contact.py (default: all)")
    parser.add_argument("--together", action="store_true", help="one process for all parts that need the model")
    parser.add_argument("--in-process", action="store_true", help="without time limits; not `contact` and `profile`")
    parser.add_argument("--started", type=float, help="seconds since 1970 from which --minutes count (default: now)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that everything runs")
    arguments = parser.parse_args(command_line)
    if arguments.dtype is None:
        arguments.dtype = "float32" if arguments.smoke else "bfloat16"
    if arguments.cost_folder is None and not arguments.smoke:
        arguments.cost_folder = measured_folder()
    return arguments


def check(arguments: argparse.Namespace) -> None:
    """Refuse what would give figures that mean nothing without saying so, before minutes have passed."""
    if arguments.replay and arguments.smoke:
        raise ValueError("a smoke run replays a made-up recording, got --replay; leave it out or --smoke")
    if arguments.replay and arguments.tokenizer is None:
        raise ValueError("recorded texts need a tokenizer, got --replay alone; add --tokenizer tokenizer.json")
    if min(arguments.replay_problems, arguments.replay_tokens) < 1:
        raise ValueError("--replay-problems and --replay-tokens must be at least 1; leave --replay out for none")
    for path in [*arguments.replay, *filter(None, [arguments.tokenizer, arguments.costs])]:
        if not path.is_file():
            raise ValueError(f"{path} must be a file, got none there; check the path")
    if torch.device(arguments.device).type == "cpu" and not arguments.smoke:
        raise ValueError("timings need a GPU, got --device cpu; add --smoke to see that everything runs")
    if torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError("no GPU is visible to torch; use --device cpu --smoke to see that everything runs")


def main(command_line: list[str] | None = None) -> int:
    arguments = read_arguments(command_line)
    if undone := use_plain_float32():
        report(f"products are not to be rounded to TF32: {undone} undone")
    try:
        check(arguments)
        if torch.device(arguments.device).type == "cpu":
            os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: see `ShapeBench`
        return 0 if run(arguments) else 1
    except (ValueError, OSError) as error:
        report(f"gpu_bench: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
