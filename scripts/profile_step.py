"""Where a captured step's time goes, kernel by kernel: a table per size, over several replays.

    python scripts/profile_step.py                     # Qwen2.5-7B's shape in bfloat16, on a GPU
    python scripts/profile_step.py --shape qwen3-8b --steps 80x1@16384,112x16@2048
    python scripts/profile_step.py --smoke             # tiny sizes in Triton's interpreter: does the script run?

A size is NODESxROWS@LENGTH: nodes of all rows together behind rows of that many committed tokens. Times are those of
`--repeats` steps together.
"""

from __future__ import annotations

import argparse
import os
import sys

import measuring.interruption  # noqa: F401  (before what loads slowly)
import torch
from gpu_parts.device_option import cpu_or_gpu
from measuring.option_types import positive_integer
from workloads.model_shapes import ALL_SHAPES, SMOKE_SHAPE

STEPS = "0x1@2048,80x1@2048,80x1@16384,112x16@2048"
SMOKE_STEPS = "3x1@70"
MAX_POSITIONS = 40960
DTYPES = ("bfloat16", "float16", "float32")  # of torch


def read_sizes(text: str) -> list[tuple[int, int, int]]:
    """(nodes, rows, length) of every size."""
    try:
        sizes = []
        for size in text.split(","):
            counts, length = size.split("@")
            nodes, rows = counts.split("x")
            sizes.append((int(nodes), int(rows), int(length)))
        if all(nodes >= 0 and rows >= 1 and length >= 1 for nodes, rows, length in sizes):
            return sizes
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"must be NODESxROWS@LENGTH, of at least 0 x 1 @ 1, with commas between, got {text!r}"
    )


def profiled(bench, nodes: int, rows: int, length: int, *, repeats: int) -> str:
    """The table of one size."""
    from gpu_parts.bench_model import step_noise
    from gpu_parts.step_bench import FULL, StepBench
    from torch.profiler import ProfilerActivity, profile

    is_gpu = bench.device.type == "cuda"
    step, live = bench.step(rows, length)
    batch = StepBench(bench, FULL, bytes_per_second=1.0).drafts(rows, nodes)
    noise = step_noise(live)

    def run() -> None:
        step.prepare(batch, live, noise)
        step.launch()
        step.verdicts()

    with torch.inference_mode(), step.attention():
        run()  # records
        run()
        with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as found:
            for _ in range(repeats):
                run()
            if is_gpu:
                torch.cuda.synchronize(bench.device)
    order = "self_cuda_time_total" if is_gpu else "self_cpu_time_total"
    return found.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=60)


def main(command_line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(ALL_SHAPES), default="qwen2.5-7b", help="model by shape (%(default)s)")
    parser.add_argument("--device", type=cpu_or_gpu, default="cuda", help="of torch (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights (%(default)s)")
    parser.add_argument("--steps", type=read_sizes, metavar="NODESxROWS@LENGTH,...", help=f"default: {STEPS}")
    parser.add_argument("--repeats", type=positive_integer, default=20, help="steps per table (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU")
    arguments = parser.parse_args(command_line)
    if not arguments.smoke and not torch.cuda.is_available():
        parser.error("no GPU is visible to torch; use --smoke to see that the script runs")
    if arguments.smoke:
        idle = [name for name in ("shape", "device", "dtype") if getattr(arguments, name) != parser.get_default(name)]
        if idle:
            named = ", ".join(f"--{name}" for name in idle)
            parser.error(f"--smoke has a shape of its own on the CPU, got {named} with it; leave one out")
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
    from gpu_parts.bench_model import BenchModel
    from gpu_parts.plain_float32 import use_plain_float32

    use_plain_float32()
    device, dtype = ("cpu", "float32") if arguments.smoke else (arguments.device, arguments.dtype)
    shape = SMOKE_SHAPE if arguments.smoke else ALL_SHAPES[arguments.shape]
    bench = BenchModel(shape, device=torch.device(device), dtype=getattr(torch, dtype), max_positions=MAX_POSITIONS)
    print("\n".join([f"back end: {bench.engine.backend.reason}", *bench.fusion_report()]), flush=True)
    for nodes, rows, length in arguments.steps or read_sizes(SMOKE_STEPS if arguments.smoke else STEPS):
        print(f"== {nodes} nodes, {rows} rows, length {length}, {arguments.repeats} steps together")
        print(profiled(bench, nodes, rows, length, repeats=arguments.repeats), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
