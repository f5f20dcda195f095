"""Simulate a long run on a GPU: how full its places are, its tokens per second against an ideal, drafts and memory.

    python scripts/simulate_run.py --made-up                       # lengths of a skewed law; no files
    python scripts/simulate_run.py FILE.jsonl.gz --tokenizer tokenizer.json --plot docs/figures/long_runs.png

No model runs. Rows as long as recorded samples (or made-up ones) go through the engine's own scheduler. A step costs
what a roofline of the GPU says (--bandwidth, --flops, --host-us) and keeps as many tokens per row as a replay measured
for its draft nodes (--acceptance). `blocks` waits for the slowest of every --max-rows rows of a problem,
`places` hands a place on at once. With --memory, `rooms` admits as many rows as may become as long as their limit and
`pages` as many as there are pages for, with rows that are put back and computed again. Samples of a file are drawn with
replacement until a problem has enough. Times say how ways to schedule compare, not what a machine will reach.

Columns: `occupancy %` is the share of the places in which a row is live, over time; `of steady %` tokens per second
over those of the steps in which 95 % of the places are taken, if any; `nodes/row` the mean draft of a row. At their
peaks: `taken GB` is what pages or rooms took, `live GB` what the live rows' tokens would take without shared prompts,
so that it can be the larger one. `put back` counts rows that gave their pages back, `replayed %` what was computed
again for it, in per cent of all tokens that were kept.

With --until-decided, `decided` is `places` where a problem's rows end when its majority is decided, whatever the others
would answer. Answers are what the texts' last `\\boxed{...}` holds. What to compare is `hours`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
from long_runs.simulated_run import Acceptance, Roofline, Simulation, Trace, Workload
from measuring.interruption import run_and_report
from measuring.option_types import (
    count_list,
    existing_file,
    number_from_zero,
    picture_file,
    positive_integer,
    positive_number,
    whole_number,
    worded,
)
from measuring.progress import say
from measuring.text_table import format_table
from workloads.answers import boxed_text
from workloads.model_shapes import SHAPES

from stand.forward.cache.tree_cache import DRAFT_ROOM
from stand.scheduling.admission import AtMost
from stand.scheduling.memory import WithinMemory
from stand.scheduling.page_allocator import PageAllocator
from stand.scheduling.within_pages import GROWTH, WithinPages

HEADER = (
    "rows", "places", "way", "occupancy %", "tokens/s", "of steady %", "hours", "nodes/row", "taken GB", "live GB",
    "put back", "replayed %",
)  # fmt: skip
MEAN_LENGTH = 8000
MADE_UP_SAMPLES = 64  # per problem; rows are drawn from them
MOST_ROWS = 256


def read_arguments(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=existing_file, help="recorded trajectories, .jsonl or .jsonl.gz")
    parser.add_argument("--tokenizer", type=existing_file, help="tokenizer.json")
    parser.add_argument("--made-up", action="store_true", help="log-normal lengths instead of a file")
    parser.add_argument(
        "--mean-length", type=positive_number, help=f"of made-up lengths, tokens (default: {MEAN_LENGTH})"
    )
    parser.add_argument("--scale", type=positive_number, default=1.0, help="all lengths times this (%(default)s)")
    parser.add_argument(
        "--limit", type=positive_integer, help="new tokens that a row may get (default: the longest sample's)"
    )
    parser.add_argument(
        "--rows",
        type=count_list,
        default=[64, 256, 1024, 4096],
        metavar="N,N,...",
        help="of a whole run (default: 64,256,1024,4096)",
    )
    parser.add_argument(
        "--per-problem", type=positive_integer, default=64, help="samples of each problem, of those rows (%(default)s)"
    )
    parser.add_argument(
        "--max-rows", type=count_list, default=[64], metavar="N,N,...", help="decoded at a time (default: 64)"
    )
    parser.add_argument(
        "--memory", type=positive_number, help="GB for keys: further lines with as many rows as they hold"
    )
    parser.add_argument(
        "--until-decided", action="store_true", help="a further line: rows end with their problem's vote (default: no)"
    )
    parser.add_argument(
        "--page-size", type=count_list, metavar="SLOTS,...", help="of the lines by pages, with --memory (default: 64)"
    )
    parser.add_argument(
        "--growth",
        type=count_list,
        metavar="SLOTS,...",
        help=f"kept free per row when one starts, of the lines by pages (default: {GROWTH})",
    )
    parser.add_argument(
        "--most-rows",
        type=positive_integer,
        help=f"live at once where memory decides (default: {MOST_ROWS}, as in a captured step)",
    )
    add_step_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="of lengths and accepted tokens (%(default)s)")
    parser.add_argument("--plot", type=picture_file, help="draw the last number of rows over time")
    arguments = parser.parse_args(command_line)
    settle(parser, arguments)
    return arguments


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """What a step costs, and what it keeps."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b", help="model by shape (%(default)s)")
    parser.add_argument(
        "--bandwidth", type=positive_number, default=3.4, help="TB/s that a step reaches (%(default)s; an H200 has 4.8)"
    )
    parser.add_argument(
        "--flops", type=positive_number, default=600.0, help="TFLOP/s that it reaches (%(default)s; an H200 has 989)"
    )
    parser.add_argument(
        "--host-us", type=number_from_zero, default=300.0, help="what the host adds to a step (%(default)s)"
    )
    parser.add_argument(
        "--budget", type=whole_number, default=112, help="draft nodes of all rows of a step together (%(default)s)"
    )
    parser.add_argument(
        "--acceptance",
        type=worded(read_acceptance),
        default="0:1,8:2.6,80:3.9",
        metavar="NODES:TOKENS,...",
        help="tokens per step by nodes per row (%(default)s)",
    )


def settle(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together, and fill in those of pages."""
    if (arguments.file is None) != arguments.made_up:
        parser.error("give a file of recordings or --made-up, one of them")
    if arguments.file is not None and arguments.tokenizer is None:
        parser.error("a file's lengths need --tokenizer tokenizer.json")
    if arguments.file is None and arguments.tokenizer is not None:
        parser.error("--tokenizer is for a file of recordings, got --made-up; leave it out")
    if arguments.file is not None and arguments.mean_length is not None:
        parser.error("--mean-length is of made-up lengths, got a file; leave it out, or scale the file's (--scale)")
    if arguments.file is None and arguments.until_decided:
        parser.error("--until-decided needs answers, got --made-up; give a file of recordings")
    if arguments.memory is None and (arguments.page_size or arguments.growth):
        parser.error("--page-size and --growth are of lines by pages; give --memory")
    if arguments.memory is None and arguments.most_rows is not None:
        parser.error("--most-rows is of lines in which memory decides; give --memory, or take --max-rows")
    arguments.page_size, arguments.growth = arguments.page_size or [64], arguments.growth or [GROWTH]
    arguments.mean_length = arguments.mean_length or MEAN_LENGTH
    arguments.most_rows = arguments.most_rows or MOST_ROWS
    largest = max(arguments.page_size)
    if arguments.memory is not None and 1e9 * arguments.memory < largest * token_bytes_of(arguments):
        parser.error(f"--memory must hold a page of {largest} slots, got {arguments.memory}; lower --page-size")


def read_acceptance(text: str) -> Acceptance:
    """From 0:1,8:2.6,80:3.9."""
    try:
        nodes, tokens = zip(*(map(float, pair.split(":")) for pair in text.split(",")), strict=True)
    except ValueError:
        nodes, tokens = (), ()
    is_finite = all(map(math.isfinite, (*nodes, *tokens)))
    if not nodes or not is_finite or nodes[0] != 0 or list(nodes) != sorted(set(nodes)) or min(tokens) < 1:
        raise ValueError(f"must rise from 0 nodes with 1 token or more each, got {text!r}; write 0:1,8:2.6")
    return Acceptance(nodes, tokens)


@dataclass(frozen=True, slots=True)
class Problem:
    """What is known of a problem's samples."""

    prompt: int  # tokens
    lengths: np.ndarray  # of samples, tokens
    answers: Sequence[str | None]  # of samples


def problems_of(arguments: argparse.Namespace) -> list[Problem]:
    if arguments.made_up:
        generator, spread = np.random.default_rng(arguments.seed), 0.6
        middles = arguments.mean_length * generator.lognormal(-0.125, 0.5, 64)
        drawn = [middle * generator.lognormal(-(spread**2) / 2, spread, MADE_UP_SAMPLES) for middle in middles]
        return [Problem(200, lengths, [None] * MADE_UP_SAMPLES) for lengths in drawn]
    from workloads.recordings import Selection, read_recordings, read_tokenizer

    tokenizer = read_tokenizer(arguments.tokenizer)
    found: dict[int, tuple[int, list[int], list[str | None]]] = {}
    for one in read_recordings(arguments.file, tokenizer, Selection()):
        _, lengths, answers = found.setdefault(one.problem, (max(len(one.prompt), 1), [], []))
        lengths.append(len(one.tokens))
        answers.append(boxed_text(tokenizer.decode(one.tokens.tolist())) if arguments.until_decided else None)
    return [Problem(prompt, np.array(lengths), answers) for prompt, lengths, answers in found.values()]


def workload_of(arguments: argparse.Namespace, problems: Sequence[Problem], num_rows: int) -> Workload:
    """`num_rows` rows, problem by problem; problems come again where there are too few."""
    generator, prompts, samples, answers = np.random.default_rng(arguments.seed), [], [], []
    for place in range(-(-num_rows // arguments.per_problem)):
        problem = problems[place % len(problems)]
        count = min(arguments.per_problem, num_rows - place * arguments.per_problem)
        drawn = generator.choice(len(problem.lengths), count)
        prompts.append(problem.prompt)
        samples.append(tuple(np.maximum(problem.lengths[drawn] * arguments.scale, 1).astype(int).tolist()))
        answers.append([problem.answers[sample] for sample in drawn])
    limit = max(max(own) for own in samples) if arguments.limit is None else arguments.limit
    lengths = tuple(tuple(min(n, limit) for n in own) for own in samples)
    said = (zip(*pair, strict=True) for pair in zip(answers, samples, strict=True))
    in_time = tuple(tuple(answer if n <= limit else None for answer, n in own) for own in said)
    return Workload(tuple(prompts), lengths, limit, in_time)


def check_memory(memory: float, workload: Workload, token_bytes: int) -> None:
    """Raise ValueError where one row alone, with its prompt and its draft, may need more GB than there are."""
    num_bytes = (max(workload.prompts) + workload.limit + DRAFT_ROOM) * token_bytes
    least = math.ceil(num_bytes / 1e5) / 1e4
    if memory < least:
        raise ValueError(f"--memory must hold a row of {workload.limit} new tokens, got {memory}; give {least} or more")


def traces(arguments: argparse.Namespace, workload: Workload) -> Iterator[tuple[int, str, Trace]]:
    """Places, way and trace of everything that is compared."""
    acceptance, shape = arguments.acceptance, SHAPES[arguments.shape]
    rates = 1e12 * arguments.bandwidth, 1e12 * arguments.flops, 1e-6 * arguments.host_us
    roofline = Roofline(shape, *rates)

    def simulation() -> Simulation:
        return Simulation(workload, roofline, acceptance, budget=arguments.budget, seed=arguments.seed)

    for max_rows in arguments.max_rows:
        places = min(max_rows, workload.num_rows)
        yield places, "blocks", simulation().blocks(max_rows, AtMost(max_rows))
        yield places, "places", simulation().places(AtMost(max_rows))
        if arguments.until_decided:
            yield places, "decided", simulation().places(AtMost(max_rows), until_decided=True)
    if arguments.memory is not None:
        num_bytes, most = 1e9 * arguments.memory, arguments.most_rows
        trace = simulation().places(WithinMemory(num_bytes, roofline.cache_bytes, most))
        yield int(trace.live.max()), "rooms", trace
        for size, growth in product(arguments.page_size, arguments.growth):
            pages = PageAllocator(size, int(num_bytes / roofline.cache_bytes / size))
            allowed = WithinPages(pages, most_rows=most, most_slots=lambda rows: arguments.budget, growth=growth)
            trace = simulation().places(allowed)
            yield int(trace.live.max()), f"pages of {size}, growth {growth}", trace


@dataclass(frozen=True, slots=True)
class Line:
    """One way to schedule so many rows."""

    num_rows: int
    places: int
    way: str
    trace: Trace

    def cells(self, token_bytes: int) -> tuple[object, ...]:
        """As in `HEADER`. token_bytes: keys and values of a token."""
        trace, steady = self.trace, self.trace.steady_rate(self.places)
        return (
            self.num_rows, self.places, self.way, 100 * trace.occupancy(self.places), round(trace.rate()),
            None if steady is None else 100 * trace.rate() / steady, trace.seconds[-1] / 3600,
            float((trace.nodes_per_row * trace.live).sum() / trace.live.sum()),
            token_bytes * trace.taken_tokens.max() / 1e9, token_bytes * trace.live_tokens.max() / 1e9,
            trace.num_put_back, 100 * trace.num_replayed / trace.tokens.sum(),
        )  # fmt: skip


def plot(lines: Sequence[Line], token_bytes: int, path: Path) -> None:
    """Of the last number of rows: places taken, draft nodes per row and memory, over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6))
    for one in [one for one in lines if one.num_rows == lines[-1].num_rows]:
        trace, minutes, label = one.trace, one.trace.seconds / 60, f"{one.way}: {one.places}"
        thin = slice(None, None, max(len(minutes) // 2000, 1))
        axes[0].plot(minutes[thin], trace.live[thin], label=label)
        axes[1].plot(minutes[thin], trace.nodes_per_row[thin], label=label)
        line = axes[2].plot(minutes[thin], token_bytes * trace.taken_tokens[thin] / 1e9, label=f"{one.way}, taken")[0]
        axes[2].plot(
            minutes[thin], token_bytes * trace.live_tokens[thin] / 1e9, ":", color=line.get_color(), label="its tokens"
        )
    titles = ("rows live", "draft nodes per row", "keys and values, GB")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="minutes")
    for axis in axes[1:]:
        axis.set_yscale("log")
    axes[0].legend(fontsize="small")
    axes[2].legend(fontsize="x-small", ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def simulate(arguments: argparse.Namespace) -> Iterator[Line]:
    """Everything that is compared, as each is finished."""
    problems = problems_of(arguments)
    workloads = [workload_of(arguments, problems, num_rows) for num_rows in arguments.rows]
    for workload in workloads if arguments.memory is not None else ():
        check_memory(arguments.memory, workload, token_bytes_of(arguments))
    for num_rows, workload in zip(arguments.rows, workloads, strict=True):
        for places, way, trace in traces(arguments, workload):
            say(f"{num_rows} rows, {way}: {trace.rate():,.0f} tokens/s")
            yield Line(num_rows, places, way, trace)


def token_bytes_of(arguments: argparse.Namespace) -> int:
    """Keys and values of a token, in 16 bits each."""
    return 2 * SHAPES[arguments.shape].cache_elements()


def report(lines: Sequence[Line], token_bytes: int) -> None:
    rows = [line.cells(token_bytes) for line in lines]
    print(format_table(HEADER, rows), end="\n\n")
    print(json.dumps([dict(zip(HEADER, map(float_or_text, row), strict=True)) for row in rows]))


def main(command_line: Sequence[str] | None = None) -> int:
    arguments = read_arguments(command_line)
    token_bytes = token_bytes_of(arguments)
    draw = None if arguments.plot is None else partial(plot, token_bytes=token_bytes, path=arguments.plot)
    return run_and_report("simulate_run", simulate(arguments), partial(report, token_bytes=token_bytes), draw)


def float_or_text(value: object) -> object:
    return value if value is None or isinstance(value, (int, str)) else float(value)


if __name__ == "__main__":
    sys.exit(main())
