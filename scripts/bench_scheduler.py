"""Places that are handed on against blocks that wait: wall-clock, tokens per second and occupancy on one model.

    python scripts/bench_scheduler.py                          # bundled model, 64 trajectories, 8 rows at a time
    python scripts/bench_scheduler.py --model smollm2 --num-problems 2 --max-new-tokens 512 --plot occupancy.png

Both arms draw the same trajectories of the same problem: `blocks` decodes --rows of them, waits for the slowest and
goes on with the next ones; `places` gives a place to the next one as soon as one has ended. With the rule `match` both
draw the same tokens, which is checked, so that the ratio of their times is that of their speeds. The arms take turns in
one process, each with an empty lookup, after a short draw by both that is thrown away; ratios are medians over pairs,
one pair per problem. Other rules draw other texts in the two arms: their rates in tokens per second are compared then,
which is said on stderr. The CPU time of this process, with one thread (the default), is what the wall-clock would be on
a machine without other work.

Columns: `taken %` is the share of the places in which a row was live, over time; `peak slots` the most cache slots that
`places` took, and `of them tokens %` how many of those held a committed token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
import torch
from measuring.interruption import run_and_report
from measuring.option_types import picture_file, positive_integer, whole_number
from measuring.progress import say
from measuring.setup import add_options, fill_defaults, load_model, load_tasks, prompt_ids
from measuring.text_table import format_table
from measuring.trajectories import REPEATING
from workloads.problem_sets import Task

import stand

ARMS = ("blocks", "places")
WARM_UP_TOKENS = 32
HEADER = (
    "problem", "tokens", "blocks s", "places s", "ratio", "blocks CPU s", "places CPU s", "CPU ratio", "blocks taken %",
    "places taken %", "peak slots", "of them tokens %",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens by row; seconds of decoding, and CPU time in them; (CPU seconds, rows live) after every step, and
    (slots taken, tokens cached)."""

    tokens: dict[int, list[int]]
    seconds: float
    cpu_seconds: float
    live: tuple[tuple[float, int], ...]
    slots: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    def occupancy(self, max_rows: int) -> float:
        """Mean over time of the share of places that are taken."""
        ends = [end for end, _ in self.live]
        taken = sum((end - begin) * rows for (end, rows), begin in zip(self.live, [0.0, *ends], strict=False))
        return taken / (ends[-1] * max_rows)

    @property
    def peak(self) -> tuple[int, int]:
        """Slots taken and tokens cached when most slots were taken."""
        return max(self.slots)


class Bench:
    """All arms share the model; each call gets an engine of its own. Problems are in `tasks`."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.tasks = options, load_tasks(options)
        self._model, self._tokenizer = load_model(options)

    def warm_up(self) -> None:
        """A few tokens by both arms: what only the first call of a process does is in no figure."""
        options = self.options
        few = {"trajectories": 2 * options.rows, "max_new_tokens": min(WARM_UP_TOKENS, options.max_new_tokens)}
        self.options = argparse.Namespace(**{**vars(options), **few})
        for arm in ARMS:
            self.draw(arm, self.tasks[0], seed=options.seed)
        self.options = options

    def draw(self, arm: str, task: Task, *, seed: int) -> Drawn:
        """All trajectories of one problem."""
        options = self.options
        count, size = options.trajectories, options.rows
        prompt = prompt_ids(self._tokenizer, task, options.instruction)
        drafter = stand.BlendedDrafter(budget=options.budget)
        engine = stand.wrap(self._model, self._tokenizer, drafter=drafter, verifier=options.verifier)
        steps = [range(first, min(first + size, count)) for first in range(0, count, size)]
        calls = steps if arm == "blocks" else [range(count)]
        tokens: dict[int, list[int]] = {}
        seconds, live, slots, start = 0.0, [], [], time.process_time()

        def note(run: stand.Run) -> None:
            live.append((time.process_time() - start, run.num_decoded))
            slots.append((run.num_slots or 0, run.num_cached))

        for rows in calls:
            run = engine.run(
                [stand.Request(prompt, rows=rows)],
                max_rows=size,
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                top_k=0 if options.top_k is None else options.top_k,
                top_p=1.0 if options.top_p is None else options.top_p,
                seed=seed,
                on_step=note,
            )
            tokens |= {one.row: one.token_ids for one in run}
            seconds += run.stats.wall_seconds
        return Drawn(tokens, seconds, time.process_time() - start, tuple(live), tuple(slots))


@dataclass(frozen=True, slots=True)
class Pair:
    """What both arms took for one problem."""

    problem: str
    blocks: Drawn
    places: Drawn

    @property
    def ratio(self) -> float:
        """How many times as fast places were, by the clock."""
        return self.blocks.seconds / self.places.seconds * self._tokens_ratio

    @property
    def cpu_ratio(self) -> float:
        """By CPU time."""
        return self.blocks.cpu_seconds / self.places.cpu_seconds * self._tokens_ratio

    @property
    def _tokens_ratio(self) -> float:
        return self.places.num_tokens / self.blocks.num_tokens

    def cells(self, max_rows: int) -> tuple[object, ...]:
        """As in `HEADER`."""
        blocks, places = self.blocks, self.places
        taken, cached = places.peak
        return (
            self.problem, places.num_tokens, blocks.seconds, places.seconds, self.ratio, blocks.cpu_seconds,
            places.cpu_seconds, self.cpu_ratio, 100 * blocks.occupancy(max_rows), 100 * places.occupancy(max_rows),
            taken, 100 * cached / max(taken, 1),
        )  # fmt: skip


def plot(pair: Pair, max_rows: int, path: Path) -> None:
    """Rows live over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 3))
    for arm in ARMS:
        one: Drawn = getattr(pair, arm)
        share = 100 * one.occupancy(max_rows)
        axis.step(*zip(*one.live, strict=True), where="pre", label=f"{arm}: {share:.0f} % of {max_rows} places taken")
    axis.set(xlabel="CPU seconds", ylabel="rows live", ylim=(0, max_rows + 0.5))
    axis.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def read_options(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, conflict_handler="resolve"
    )
    add_options(parser)
    parser.add_argument("--rows", type=positive_integer, default=8, help="rows decoded at a time (%(default)s)")
    parser.add_argument(
        "--num-problems", type=positive_integer, default=5, help="the first so many problems (%(default)s)"
    )
    parser.add_argument("--threads", type=positive_integer, default=1, help="CPU threads (%(default)s)")
    parser.add_argument("--trajectories", type=positive_integer, default=64, help="per problem (%(default)s)")
    parser.add_argument(
        "--budget", type=whole_number, default=32, help="draft nodes of all rows of a step together (%(default)s)"
    )
    parser.add_argument("--verifier", default="match", help="rule by name (%(default)s)")
    parser.add_argument("--plot", type=picture_file, help="rows live over time, of the last problem")
    options = parser.parse_args(command_line)
    fill_defaults(options)
    return options


def measure(options: argparse.Namespace) -> Iterator[Pair]:
    """One pair per problem, as each is finished. Raises RuntimeError where arms that must draw the same do not."""
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    bench.warm_up()
    if options.verifier not in REPEATING:
        say(f"with {options.verifier} the arms draw other texts: ratios are those of tokens per second")
    for place, task in enumerate(bench.tasks):
        order = ARMS if place % 2 == 0 else ARMS[::-1]
        pair = Pair(task.name, **{arm: bench.draw(arm, task, seed=options.seed + place) for arm in order})
        if options.verifier in REPEATING and pair.blocks.tokens != pair.places.tokens:
            raise RuntimeError(f"both arms must draw the same tokens, got others for {task.name}; this is a fault")
        say(f"{task.name}: places are {pair.ratio:.2f} ({pair.cpu_ratio:.2f}) times as fast as blocks")
        yield pair


def report(pairs: Sequence[Pair], max_rows: int) -> None:
    print(format_table(HEADER, [pair.cells(max_rows) for pair in pairs]), end="\n\n")
    ratios, cpu_ratios = [pair.ratio for pair in pairs], [pair.cpu_ratio for pair in pairs]
    medians = {"median_ratio": statistics.median(ratios), "median_cpu_ratio": statistics.median(cpu_ratios)}
    print(json.dumps({**medians, "ratios": ratios, "cpu_ratios": cpu_ratios}))


def main(command_line: Sequence[str] | None = None) -> int:
    options = read_options(command_line)
    draw = None if options.plot is None else lambda pairs: plot(pairs[-1], options.rows, options.plot)
    return run_and_report("bench_scheduler", measure(options), partial(report, max_rows=options.rows), draw)


if __name__ == "__main__":
    sys.exit(main())
