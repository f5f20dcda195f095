"""What a GPU makes of a step's parts, and how far each is from what the hardware allows.

    python scripts/gpu_bench.py                                  # Qwen2.5-7B's shape, bfloat16, minutes
    python scripts/gpu_bench.py --shapes qwen2.5-14b,qwen3-8b --parts products,attention
    python scripts/gpu_bench.py --device cpu --smoke             # tiny sizes in Triton's interpreter: does it run?

Parts: `products` (matrix products of a layer and the output head, by tokens), `attention` (tree attention of one layer
against masked attention), `laws` (softmax, best tokens, race, traversal, compaction). Random weights, nothing is
downloaded. With products and attention of one row the table of step times is written to `--knee-folder`, and the knee
printed: how many tokens a step may hold before it costs 1.05, 1.1, 1.25 times one token.

Progress goes to stderr, tables to stdout; the last stdout line is one JSON document. A smoke run prints no table: the
times of an interpreter mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from device_timer import device_name
from knee_table import RATIOS, KneeTable
from model_shapes import SHAPES, SMOKE_SHAPE, ModelShape
from text_table import format_table

if TYPE_CHECKING:  # the kernels are imported once it is known whether they are to be interpreted
    from kernel_bench import Machine, Timing

PARTS = ("products", "attention", "laws")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SMOKE_NOTE = "smoke run in Triton's interpreter: the times below mean nothing"


def measure(arguments: argparse.Namespace, shape: ModelShape) -> tuple[Machine, dict[str, list[Timing]]]:
    """Bandwidth and arithmetic rate, and the timings of every part asked for."""
    from kernel_bench import FULL, SMOKE, KernelBench

    report(f"{shape.name}: bandwidth and arithmetic rate")
    bench = KernelBench(
        shape,
        SMOKE if arguments.smoke else FULL,
        device=torch.device(arguments.device),
        dtype=DTYPES[arguments.dtype],
    )
    timings: dict[str, list[Timing]] = {}
    for part in arguments.parts:
        timings[part] = []
        for timing in getattr(bench, part)():
            timings[part].append(timing)
            report(f"{shape.name}: {timing.name}, {timing.tokens} tokens, {timing.rows} rows, length {timing.length}")
    return bench.machine, timings


def knee_table(arguments: argparse.Namespace, shape: ModelShape, timings: dict[str, list[Timing]]) -> KneeTable | None:
    """Step times from the products and the attention of one row; None unless both were measured."""
    if not {"products", "attention"} <= timings.keys():
        return None
    counts = {product.name: product.count for product in shape.products()}
    products: dict[int, float] = {}
    for timing in timings["products"]:
        products[timing.tokens] = products.get(timing.tokens, 0.0) + 1e3 * timing.seconds * counts[timing.name]
    attention: dict[int, dict[int, float]] = {}
    for timing in timings["attention"]:
        if timing.rows == 1:
            attention.setdefault(timing.length, {})[timing.tokens] = 1e3 * timing.seconds * shape.layers
    return KneeTable(shape.name, device_name(torch.device(arguments.device)), arguments.dtype, products, attention)


def machine_line(machine: Machine) -> str:
    return (
        f"copy {machine.bytes_per_second / 1e12:.2f} TB/s, "
        f"large matrix product {machine.flops_per_second / 1e12:.0f} TFLOP/s"
    )


def timing_table(timings: Sequence[Timing]) -> str:
    header = (
        "part",
        "tokens",
        "rows",
        "length",
        "us",
        "floor us",
        "% of floor",
        "torch us",
        "torch / ours",
        "max diff",
    )
    return format_table(header, [timing_row(timing) for timing in timings])


def timing_row(timing: Timing) -> tuple[object, ...]:
    reference = None if timing.reference is None else 1e6 * timing.reference
    ratio = None if timing.reference is None else timing.reference / timing.seconds
    difference = None if timing.difference is None else f"{timing.difference:.1e}"
    times = (1e6 * timing.seconds, 1e6 * timing.floor, timing.percent)
    return (timing.name, timing.tokens, timing.rows, timing.length, *times, reference, ratio, difference)


def knee_lines(table: KneeTable) -> str:
    header = ("length", "ms, 1 token", *(f"tokens at {ratio:.2f} x" for ratio in RATIOS))
    rows = [
        (length, table.step(1, length), *(table.knee(length, ratio) for ratio in RATIOS)) for length in table.attention
    ]
    return format_table(header, rows)


def document(arguments: argparse.Namespace, results: list[dict[str, object]]) -> dict[str, object]:
    return {
        "is_smoke": arguments.smoke,
        "note": SMOKE_NOTE if arguments.smoke else None,
        "device": device_name(torch.device(arguments.device)),
        "dtype": arguments.dtype,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()},
        "results": results,
    }


def run(arguments: argparse.Namespace) -> None:
    results = []
    for shape in [SMOKE_SHAPE] if arguments.smoke else [SHAPES[name] for name in arguments.shapes]:
        machine, timings = measure(arguments, shape)
        table = knee_table(arguments, shape, timings)
        if table is not None and arguments.knee_folder is not None:
            report(f"wrote {table.save(arguments.knee_folder)}")
        if not arguments.smoke:
            print(f"{shape.name}, {arguments.dtype}: {machine_line(machine)}\n")
            for part in timings.values():
                print(timing_table(part) + "\n")
            if table is not None:
                print(knee_lines(table) + "\n")
        results.append(
            {
                "shape": asdict(shape),
                "machine": asdict(machine),
                "timings": {part: [asdict(timing) for timing in part_of] for part, part_of in timings.items()},
                "knee": None if table is None else table.as_document()["knee"],
            }
        )
    print(json.dumps(document(arguments, results)))


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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", type=names_of(tuple(SHAPES)), default=["qwen2.5-7b"], metavar="NAME,...")
    parser.add_argument("--parts", type=names_of(PARTS), default=list(PARTS), metavar="PART,...")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: float32 in a smoke run, else bfloat16")
    parser.add_argument("--knee-folder", type=Path, help="default: ~/.cache/stand; of a smoke run, none")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that everything runs")
    arguments = parser.parse_args(command_line)
    if arguments.dtype is None:
        arguments.dtype = "float32" if arguments.smoke else "bfloat16"
    if arguments.knee_folder is None and not arguments.smoke:
        arguments.knee_folder = Path.home() / ".cache" / "stand"
    return arguments


def check(arguments: argparse.Namespace) -> None:
    """Refuse what would give figures that mean nothing without saying so."""
    if torch.device(arguments.device).type == "cpu" and not arguments.smoke:
        raise ValueError("timings need a GPU, got --device cpu; add --smoke to see that everything runs")
    if torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError("no GPU is visible to torch; use --device cpu --smoke to see that everything runs")


def main(command_line: list[str] | None = None) -> int:
    arguments = read_arguments(command_line)
    try:
        check(arguments)
        if torch.device(arguments.device).type == "cpu":
            os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: see `measure`
        run(arguments)
    except (ValueError, OSError) as error:
        report(f"gpu_bench: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
