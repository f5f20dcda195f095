"""What a step with so many tokens costs on this CPU, by the shape of the model and its dtype.

    python scripts/bench_steps.py --shape qwen2.5-1.5b --dtype bfloat16
    STAND_PORTABLE=1 python scripts/bench_steps.py --shape qwen2.5-1.5b --dtype bfloat16 --no-fuse    # torch's kernels

The model has random weights, which is as good as trained ones for time. A step is what an engine runs between draft and
commit, behind `--length` tokens; a step of one token per row is one without drafts. Medians of a few rounds, sizes in
turn. As in the budget of drafts, a step counts as no cheaper than a smaller one: what was measured below that is shown
with the smaller step's time. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import measuring.interruption  # noqa: F401  (before what loads slowly)
import torch
from measuring.option_types import count_list, positive_integer
from measuring.text_table import format_table
from workloads.model_shapes import SHAPES, SMOKE_SHAPE

import stand

MODELS = {shape.name: shape for shape in (SMOKE_SHAPE, *SHAPES.values())}
MAX_POSITIONS = 8192
LONGEST = MAX_POSITIONS - 64  # there is room for every draft
HEADER = ("rows", "tokens", "milliseconds", "x without drafts", "GB/s of weights")


def measure(options: argparse.Namespace) -> list[dict]:
    torch.set_num_threads(options.threads)
    shape, dtype = MODELS[options.shape], getattr(torch, options.dtype)
    model = shape.random_model(device=torch.device("cpu"), dtype=dtype, max_positions=MAX_POSITIONS)
    engine = stand.wrap(model, fuse=options.fuse)
    nbytes = shape.weight_count() * dtype.itemsize
    found = []
    for rows in options.rows:
        cost = engine.measure_cost(num_rows=rows, length=options.length, most_tokens=options.most_tokens)
        for tokens, seconds in zip(cost.tokens, cost.seconds, strict=True):
            ratio, speed = seconds / cost.seconds[0], 1e-9 * nbytes / seconds
            found.append({"rows": rows, "tokens": tokens, "seconds": seconds, "ratio": ratio, "gigabytes": speed})
    return found


def read_options(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape",
        choices=MODELS,
        default="qwen2.5-1.5b",
        help="the model whose shape the random weights have (%(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the weights (%(default)s)"
    )
    parser.add_argument(
        "--rows", type=count_list, default=[1, 4], metavar="B,B,...", help="rows decoded together (default: 1,4)"
    )
    parser.add_argument("--most-tokens", type=positive_integer, default=16, help="of all rows of a step (%(default)s)")
    parser.add_argument("--length", type=positive_integer, default=300, help="committed tokens per row (%(default)s)")
    parser.add_argument(
        "--threads", type=positive_integer, default=torch.get_num_threads(), help="CPU threads (default: torch's)"
    )
    parser.add_argument("--no-fuse", dest="fuse", action="store_false", help="modules as transformers has them")
    options = parser.parse_args(command_line)
    if options.most_tokens <= max(options.rows):
        most = max(options.rows)
        parser.error(f"--most-tokens must be above the {most} rows of --rows, got {options.most_tokens}")
    if options.length > LONGEST:
        parser.error(f"--length must be at most {LONGEST}, got {options.length}")
    return options


def main(command_line: Sequence[str] | None = None) -> None:
    found = measure(read_options(command_line))
    rows = [
        (one["rows"], one["tokens"], f"{1e3 * one['seconds']:.1f}", f"{one['ratio']:.2f}", f"{one['gigabytes']:.1f}")
        for one in found
    ]
    print(format_table(HEADER, rows), end="\n\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
