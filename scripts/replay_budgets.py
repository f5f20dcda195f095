"""How many nodes are worth their time: recordings replayed without a model, with times of steps that were measured.

    python scripts/replay_budgets.py FILE --tokenizer tokenizer.json --bench docs/figures/gpu_h100.json \
        --shape qwen2.5-7b --rows 1,16,64 --lengths 2048,16384 --max-problems 2 --max-tokens 1200

FILE is a recording as for `replay.py`. The samples of each problem are decoded side by side, so many rows at once; who
ends frees no place. Drafts are deterministic, and the lookup counts tokens and is empty where a problem begins. A step
takes the time that `gpu_bench.py` found for a step of the nearest number of rows, behind `--lengths` committed tokens,
whatever the texts' own length is, and of the next larger size that steps are captured for.

Drafts: none; a fixed number of nodes; `curve`, growth by those times along the convex curve below them; `sizes`,
growth by those times up to the sizes of captured steps; `computed`, the same by costs that are computed from the
model's sizes (`AssumedCosts`), as where nobody has timed anything. `speed-up` is tokens per second over `none`. The
table goes to stdout, progress to stderr; the last stdout line is one JSON document.

What this cannot tell: the host's time for drafts of other sizes, a model's own laws, and what acceptance is with one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
import torch
from measuring.interruption import run_and_report
from measuring.option_types import count_list, existing_file
from measuring.progress import Progress, say
from measuring.text_table import format_table
from replay_parts.selection import add_selection, selection_of
from replay_parts.side_by_side import SideBySide
from workloads.model_shapes import SHAPES
from workloads.recordings import Recording, by_problem, read_recordings, read_tokenizer

from stand.drafters.costs.assumed import RIDGES, AssumedCosts, ModelSizes
from stand.drafters.costs.step_cost import CostTable, StepCost
from stand.gpu.packets.step_size import NUM_TOKENS
from stand.trees import BlendedLookup

HOPPER = RIDGES[9, 0]
MAX_POSITIONS = 40960
GROWN = ("curve", "sizes", "computed")


@dataclass(frozen=True, slots=True)
class Result:
    """One way of drafting, over all problems."""

    rows: int
    length: int
    drafts: str
    tokens_per_second: float
    tokens_per_step: float  # and row
    nodes_per_step: float  # of all rows
    live_rows: float
    speedup: float | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """Of steps: as they were measured, and as they are computed."""

    measured: CostTable
    computed: AssumedCosts

    def most_nodes(self, num_rows: int, length: int) -> int:
        return max(self.measured.at(length, num_rows=num_rows).most_tokens - num_rows, 0)

    def seconds(self, num_rows: int, length: int, num_tokens: int) -> float:
        """Of a step that is padded to the next size. Raises ValueError beyond what was measured."""
        cost = self.measured.at(length, num_rows=num_rows)
        size = next(size for size in NUM_TOKENS if size >= num_tokens)
        if size > cost.most_tokens:
            raise ValueError(
                f"steps must have at most {cost.most_tokens} tokens, which were timed, got {num_tokens}; lower --budget"
            )
        return float(np.interp(size, cost.tokens, cost.seconds))

    def limits(self, drafts: str, num_rows: int, length: int) -> dict[str, object]:
        """Of `BlendedLookup.draft`: budget and rises."""
        most = self.most_nodes(num_rows, length)
        if drafts not in GROWN:
            return {"budget": min(0 if drafts == "none" else int(drafts), most)}
        table = self.computed if drafts == "computed" else self.measured
        cost = table.at(length, num_rows=num_rows)
        return {"budget": most, "rises": cost.rises(num_rows, most, () if drafts == "curve" else NUM_TOKENS)}


def replay(problems: list[list[Recording]], num_rows: int, length: int, drafts: str, times: Times) -> Result:
    seconds = num_tokens = num_steps = row_steps = num_nodes = 0
    for samples in problems:
        lookup = BlendedLookup()
        lookup.learn(samples[0].prompt[:1], samples[0].prompt[1:])
        for first in range(0, len(samples), num_rows):
            rows = SideBySide(lookup, samples[first : first + num_rows])
            while rows.live:
                live = len(rows.live)
                batch = rows.draft(**times.limits(drafts, live, length))
                seconds += times.seconds(live, length, batch.num_nodes)
                num_tokens += rows.follow(batch)
                num_nodes += batch.num_nodes - live
                row_steps += live
            num_steps += rows.num_steps
    return Result(
        num_rows, length, drafts,
        tokens_per_second=num_tokens / seconds, tokens_per_step=num_tokens / row_steps,
        nodes_per_step=num_nodes / num_steps, live_rows=row_steps / num_steps,
    )  # fmt: skip


def read_times(path: Path, shape: str) -> Times:
    """Raises ValueError where the file has no times of the shape."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        found = next(one["parts"]["costs"] for one in results if one["shape"]["name"] == shape)
        costs = tuple(
            StepCost(one["rows"], one["length"], tuple(one["tokens"]), tuple(one["seconds"])) for one in found
        )
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise ValueError(
            f"{path} must have step costs of {shape}, as gpu_bench.py writes them, got none ({error!r}); run it with "
            "--parts steps"
        ) from error
    model = SHAPES[shape].random_model(device=torch.device("meta"), dtype=torch.bfloat16, max_positions=MAX_POSITIONS)
    return Times(CostTable(costs), AssumedCosts(ModelSizes.of(model), HOPPER))


def table(results: list[Result]) -> str:
    header = [
        "rows",
        "tokens before",
        "drafts",
        "tokens/s",
        "speed-up",
        "tokens per step",
        "nodes per step",
        "live rows",
    ]
    rows = [
        [
            r.rows, r.length, r.drafts, f"{r.tokens_per_second:,.0f}", r.speedup and f"{r.speedup:.3f}",
            f"{r.tokens_per_step:.2f}", f"{r.nodes_per_step:.0f}", f"{r.live_rows:.1f}",
        ]
        for r in results
    ]  # fmt: skip
    return format_table(header, rows)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=existing_file, metavar="FILE", help="recordings, as for replay.py")
    parser.add_argument("--tokenizer", required=True, type=existing_file, help="tokenizer.json")
    parser.add_argument("--bench", required=True, type=existing_file, help="what gpu_bench.py wrote")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="qwen2.5-7b", help="whose steps were timed (%(default)s)"
    )
    parser.add_argument("--rows", type=count_list, default=[1], help="decoded side by side: 1,4,16 (default: 1)")
    parser.add_argument(
        "--lengths", type=count_list, default=[2048], help="tokens that steps are behind: 2048,16384 (default: 2048)"
    )
    parser.add_argument("--budget", type=count_list, default=[48, 112], help="fixed numbers of nodes (default: 48,112)")
    add_selection(parser)
    parsed = parser.parse_args(arguments)
    parsed.selection = selection_of(parser, parsed)
    return parsed


def run(options: argparse.Namespace) -> Iterator[Result]:
    times = read_times(options.bench, options.shape)
    problems = by_problem(read_recordings(options.file, read_tokenizer(options.tokenizer), options.selection))
    say(f"{sum(map(len, problems))} recordings of {len(problems)} problems")
    drafts = ["none", *map(str, options.budget), *GROWN]
    progress = Progress(len(options.rows) * len(options.lengths) * len(drafts))
    for num_rows, length in product(options.rows, options.lengths):
        plain = None
        for name in drafts:
            found = replay(problems, num_rows, length, name, times)
            plain = found.tokens_per_second if plain is None else plain
            found = replace(found, speedup=found.tokens_per_second / plain)
            progress.add(1, f"{num_rows} rows behind {length:,} tokens, {name}: {found.speedup:.3f}")
            yield found


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)

    def report(results: list[Result]) -> None:
        print(table(results))
        print(json.dumps({"results": [asdict(result) for result in results]}))

    return run_and_report("replay_budgets", run(options), report)


if __name__ == "__main__":
    sys.exit(main())
