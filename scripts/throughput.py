"""Tokens per second of N trajectories per problem, with and without drafts, on one model in one process.

    python scripts/throughput.py                                     # bundled model, generated problems
    python scripts/throughput.py --model Qwen/Qwen2.5-7B-Instruct    # AIME 2024 from the hub
    python scripts/throughput.py --model smollm2                     # a real small model from a package index
    python scripts/throughput.py --model PATH --problems mine.jsonl --trajectories 1,4,16 --output results.jsonl

Three arms draw from the same law with the same prompts and seeds: `generate` is transformers' `model.generate`
(one call of `--rows` rows per problem, enough for its rate), `plain` is this engine without drafts, `drafted` is
this engine. They take turns within every problem, so that a noisy machine disturbs all of them. For every number
of trajectories the lookup starts anew (from `--lookup` if given) and is kept from problem to problem, unless
`--lookup-scope problem` is given. Progress goes to stderr, tables to stdout; the last stdout line is one JSON
document with every figure. docs/throughput.md says what the columns are.

With `--only drafted` (or `plain`) nothing is compared: all problems are one run, `--rows` rows at a time, and every
trajectory is a line of `--output` as soon as it ends; `--resume` goes on with such a file (docs/long_runs.md).

Nothing is lost when a run ends early. `--output` gets one line per problem, number of trajectories and arm as soon as
it is measured. After SIGINT or SIGTERM the tables and the JSON document tell of all problems that were finished, the
lookup is saved if `--save-lookup` is given, and the exit status is 130 or 143.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
import torch
from long_runs.trajectory_run import LongRun, check_resumable, digest_of, lookup_to_start_with
from measuring.interruption import Interruption, run_command
from measuring.option_types import count_list, existing_file, named, positive_number, whole_number, worded
from measuring.output_file import JsonLines, check_writable
from measuring.progress import Progress, RunProgress, say
from measuring.setup import add_options, fill_defaults, load_model, load_tasks, prompt_ids, sampling_for
from measuring.throughput_report import (
    Measured,
    arm_document,
    by_trajectories,
    conditions,
    run_document,
    run_tables,
)
from measuring.trajectories import ARMS, Drawn, Sampling, chunk_sizes, draw_with_engine, draw_with_generate
from workloads.problem_sets import Task

import stand
from stand.drafters.costs.step_cost import CostTable
from stand.trees import BlendedLookup, LookupTree, TreeShape, vocabulary_fingerprint

COST_LENGTHS = (256, 2048)  # contexts after which steps are timed, within max_new_tokens
MOST_TOKENS = 128  # timed in one step on a CPU


def new_engine(arguments: argparse.Namespace, model, tokenizer, costs: CostTable | None = None) -> stand.Engine:
    """An engine with an empty lookup, or with the one in `--lookup`. costs: what steps cost here."""
    lookup = None
    if arguments.lookup is not None:
        fingerprint = vocabulary_fingerprint(tokenizer.get_vocab())
        kind = BlendedLookup if arguments.shape is None else LookupTree
        with named("--lookup"):
            lookup = kind.load(arguments.lookup, fingerprint=fingerprint)
    if arguments.shape is None:
        settings = {"budget": arguments.budget, "costs": costs, "kind": arguments.draft_kind}
        drafter = stand.BlendedDrafter(lookup, **settings)
    else:
        drafter = stand.FixedShapeDrafter(lookup, arguments.shape, kind=arguments.draft_kind)
    return stand.wrap(model, tokenizer, drafter=drafter, verifier=arguments.verifier)


def step_costs(arguments: argparse.Namespace, model, tokenizer) -> CostTable | None:
    """From `--costs` or measured now; None with a fixed budget or shape, and where a GPU has those of its engines."""
    if arguments.budget is not None or arguments.shape is not None:
        return None
    if arguments.costs is None and model.device.type != "cpu":
        return None
    if arguments.costs is not None and arguments.costs.exists():
        with named("--costs"):
            return CostTable.load(arguments.costs)
    engine, rows = stand.wrap(model, tokenizer), min(arguments.rows or max(arguments.trajectories), 64)
    lengths = sorted({min(length, arguments.max_new_tokens) for length in COST_LENGTHS})
    most = max(MOST_TOKENS, 2 * rows) if model.device.type == "cpu" else None
    table = CostTable(tuple(engine.measure_cost(num_rows=rows, length=n, most_tokens=most) for n in lengths))
    if arguments.costs is not None:
        table.save(arguments.costs)
    return table


class Run:
    """Problems measured one after another. What is finished stays in `measured` when the run is interrupted.

    engine: the one that is drafting, with the lookup of the number of trajectories that is being measured.
    costs: what steps cost here, timed when the run begins; None with a fixed budget or shape.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.tasks = arguments, load_tasks(arguments)
        say(f"{arguments.model}: loading")
        self.model, self.tokenizer = load_model(arguments)
        self.measured: list[Measured] = []
        self.costs: CostTable | None = None
        self.engine = self._new_engine()  # what the options cannot mean is refused here, before anything is timed

    def _new_engine(self) -> stand.Engine:
        return new_engine(self.arguments, self.model, self.tokenizer, self.costs)

    @property
    def is_complete(self) -> bool:
        return len(self.measured) == sum(len(self._tasks_of(count)) for count in self.arguments.trajectories)

    def _tasks_of(self, count: int) -> Sequence[Task]:
        """The first problems, as many as are drawn with so many trajectories."""
        counts = self.arguments.problem_counts
        return self.tasks if counts is None else self.tasks[: counts[self.arguments.trajectories.index(count)]]

    def warm_up(self) -> None:
        """Step costs, then a short run of every arm on an engine that is thrown away."""
        say(f"{len(self.tasks)} problems, rows {self.arguments.rows or 'all'}: timing steps and warming up")
        self.costs = step_costs(self.arguments, self.model, self.tokenizer)
        engine = self._new_engine()
        sampling = sampling_for(self.arguments, max(self.arguments.trajectories))
        short = Sampling(**{**asdict(sampling), "max_new_tokens": min(32, sampling.max_new_tokens)})
        prompt = prompt_ids(self.tokenizer, self.tasks[0], self.arguments.instruction)
        for arm in ARMS:
            draw(engine, arm, prompt, sampling.rows, short, problem=0)

    def measure(self, lines: JsonLines, interruption: Interruption) -> None:
        """All problems with all numbers of trajectories; every arm is written to `lines` as it ends."""
        counts = self.arguments.trajectories
        progress = Progress(sum(self._num_calls(count) * len(self._tasks_of(count)) for count in counts))
        for count in counts:
            for index, task in enumerate(tasks := self._tasks_of(count)):
                if index == 0 or self.arguments.lookup_scope == "problem":
                    self.engine = self._new_engine()
                arms = {}
                for arm in (*ARMS[index % len(ARMS) :], *ARMS[: index % len(ARMS)]):  # another one first every time
                    arms[arm] = self._measure_arm(arm, index, count)
                    lines.add(self._line(task, count, arm, arms[arm]))
                    rate = f"{arm} {arms[arm].stats.tokens_per_second:.0f} tokens/s"
                    where = f"N = {count}, problem {index + 1} of {len(tasks)}"
                    progress.add(self._num_calls(count) / len(ARMS), f"{where}: {rate}")
                    interruption.check()
                self.measured.append(Measured(task, count, {arm: arms[arm] for arm in ARMS}))

    def _num_calls(self, count: int) -> int:
        """Calls of `generate` per problem, the rough measure of its time: one of transformers' own, the rest ours."""
        return 1 + 2 * len(chunk_sizes(count, sampling_for(self.arguments, count).rows))

    def _measure_arm(self, arm: str, index: int, count: int) -> Drawn:
        prompt = prompt_ids(self.tokenizer, self.tasks[index], self.arguments.instruction)
        return draw(self.engine, arm, prompt, count, sampling_for(self.arguments, count), problem=index)

    def _line(self, task: Task, count: int, arm: str, drawn: Drawn) -> dict[str, object]:
        line = {"name": task.name, "answer": task.answer, "trajectories": count, "arm": arm}
        texts = {"texts": list(drawn.texts)} if self.arguments.texts else {}
        return {**line, **arm_document(task, drawn), **texts}


def draw(engine: stand.Engine, arm: str, prompt: list[int], count: int, sampling: Sampling, *, problem: int) -> Drawn:
    """What one arm draws; `generate` draws no more than one call's rows."""
    if arm == "generate":
        return draw_with_generate(engine, prompt, sampling.rows, sampling, problem=problem)
    return draw_with_engine(engine, prompt, count, sampling, problem=problem, draft=arm == "drafted")


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument(
        "--trajectories", type=count_list, default=[1, 4, 8, 16], metavar="N,N,...", help="per problem (1,4,8,16)"
    )
    parser.add_argument(
        "--problem-counts", type=count_list, metavar="P,P,...",
        help="so many problems with each of --trajectories, so that few trajectories do not mean short runs",
    )  # fmt: skip
    parser.add_argument("--verifier", default="traversal", help="the rule, see docs/verifiers.md (traversal)")
    parser.add_argument(
        "--budget",
        type=whole_number,
        help="fixed draft nodes of all rows of a step together (default: what pays, by timed steps; on a GPU by what "
        "`stand.wrap` goes by there)",
    )
    parser.add_argument(
        "--costs", type=Path, help="file of step costs, so that runs repeat; measured and written if it does not exist"
    )
    parser.add_argument(
        "--shape",
        type=worded(TreeShape.parse),
        help="fixed drafts by STAND's rule: paper, chain:8, branching:4,2,1 ...",
    )
    parser.add_argument(
        "--draft-kind",
        choices=("sampled", "mixed", "deterministic"),
        help="how children are chosen, see docs/verifiers.md (sampled)",
    )
    parser.add_argument("--lookup", type=existing_file, help="start from this lookup")
    parser.add_argument("--save-lookup", type=Path, help="write the lookup of the last number of trajectories")
    parser.add_argument("--lookup-scope", choices=("run", "problem"), help="when it starts anew (run)")
    parser.add_argument(
        "--output", type=Path, help="new file for one JSON line per problem, N and arm, written as each ends"
    )
    parser.add_argument("--texts", action="store_true", help="put the trajectories' texts into the lines of --output")
    add_run_options(parser)
    arguments = parser.parse_args(command_line)
    if arguments.resume and arguments.only is None:
        parser.error("--resume goes on with a run of trajectories; add --only drafted, as the run began")
    if arguments.until_decided and arguments.only is None:
        parser.error("--until-decided ends trajectories of a run, not of a comparison; add --only drafted")
    if arguments.cache_gb is not None and arguments.only is None:
        parser.error("--cache-gb limits a run of trajectories; add --only drafted")
    if arguments.only is not None and (arguments.output is None or len(arguments.trajectories) != 1):
        parser.error("--only needs one number of trajectories and a file; add --trajectories N --output FILE.jsonl")
    refuse_idle_options(parser, arguments)
    if arguments.texts and arguments.output is None:
        parser.error("--texts needs a file to write to; add --output FILE.jsonl")
    if arguments.problem_counts is not None:
        if len(arguments.problem_counts) != len(arguments.trajectories) or arguments.num_problems is not None:
            parser.error("--problem-counts needs one number for each of --trajectories, and no --num-problems")
        arguments.num_problems = max(arguments.problem_counts)
    fill_defaults(arguments)
    return arguments


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Of one run, where nothing is compared."""
    parser.add_argument("--only", choices=("drafted", "plain"), help="no comparison: one run, trajectories to --output")
    parser.add_argument("--resume", action="store_true", help="go on with the run of --output, with --only")
    parser.add_argument(
        "--until-decided",
        action="store_true",
        help="end a problem's trajectories when the others cannot change its majority, with --only (default: all run)",
    )
    parser.add_argument(
        "--cache-gb", type=positive_number, help="most GB of keys and values (`max_cache_bytes`), with --only"
    )


def refuse_idle_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with an error where an option would have no effect beside another one; then fill the defaults of those."""
    if arguments.only == "plain":
        for name in ("budget", "costs", "shape", "draft_kind", "lookup", "save_lookup"):
            if getattr(arguments, name) is not None:
                parser.error(f"--{name.replace('_', '-')} has no effect on --only plain, which has no drafts")
    if arguments.only is not None and arguments.lookup_scope is not None:
        parser.error("--lookup-scope has no effect with --only, where all problems are one run; leave it")
    if arguments.shape is not None and arguments.budget is not None:
        parser.error("--budget has no effect beside --shape, which has its own number of nodes; give one of them")
    if arguments.costs is not None and (arguments.shape is not None or arguments.budget is not None):
        parser.error("--costs has no effect beside --budget or --shape, which fix the drafts; give one of them")
    arguments.draft_kind = arguments.draft_kind or "sampled"
    arguments.lookup_scope = arguments.lookup_scope or "run"


def run(arguments: argparse.Namespace, interruption: Interruption) -> None:
    check_writable(arguments.save_lookup, "--save-lookup")
    if arguments.costs is not None and not arguments.costs.exists():
        check_writable(arguments.costs, "--costs")
    check_resumable(arguments)
    with closing(JsonLines(arguments.output, "--output", goes_on=arguments.resume, is_alone=True)) as lines:
        torch.set_num_threads(arguments.threads)
        (compare if arguments.only is None else run_long)(arguments, lines, interruption)


def compare(arguments: argparse.Namespace, lines: JsonLines, interruption: Interruption) -> None:
    this_run = Run(arguments)
    this_run.warm_up()
    lines.add(conditions(arguments, this_run.costs))
    try:
        this_run.measure(lines, interruption)
    finally:
        finish(this_run)


def run_long(arguments: argparse.Namespace, lines: JsonLines, interruption: Interruption) -> None:
    """All problems as one run. However it ends, what was finished is told and the lookup is saved."""
    arguments.lookup = lookup_to_start_with(arguments)
    this_run = LongRun.of(arguments, load_tasks(arguments), lines.earlier)
    model, tokenizer = load_model(arguments)
    costs = step_costs(arguments, model, tokenizer) if arguments.only == "drafted" else None
    engine = new_engine(arguments, model, tokenizer, costs)
    header = {**conditions(arguments, costs), "problems_digest": digest_of(this_run.tasks)}
    say(f"{this_run.num_over} of {this_run.total} trajectories were done before, or are not needed any more")
    try:
        progress = RunProgress(this_run.total, this_run.num_over)
        this_run.draw(engine, lines, progress, interruption, header=None if lines.earlier else header)
    finally:
        print(this_run.table(), end="\n\n")
        print(json.dumps(this_run.document()), flush=True)
        save_lookup(arguments, engine)


def finish(this_run: Run) -> None:
    """Tables, JSON document and lookup of what was measured, be it all or not."""
    arguments = this_run.arguments
    if this_run.measured:
        groups = by_trajectories(this_run.measured)
        print(run_tables(groups), end="\n\n")
        document = {**run_document(arguments, this_run.costs, groups), "is_complete": this_run.is_complete}
        print(json.dumps(document), flush=True)
    save_lookup(arguments, this_run.engine)


def save_lookup(arguments: argparse.Namespace, engine: stand.Engine) -> None:
    if arguments.save_lookup is not None:
        engine.lookup.save(arguments.save_lookup)
        say(f"wrote {arguments.save_lookup}")


def main() -> int:
    arguments = read_arguments()
    return run_command("throughput", lambda interruption: run(arguments, interruption))


if __name__ == "__main__":
    sys.exit(main())
