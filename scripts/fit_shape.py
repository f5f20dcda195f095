"""Fit the shape of drafts to a model: run with a large shape, count which slots get accepted, keep the best ones.

    python scripts/fit_shape.py                                      # bundled model, generated problems
    python scripts/fit_shape.py --model PATH --problems mine.jsonl --nodes 16,32,80
    python scripts/throughput.py --shape "$(cat shape.txt)"          # after --save shape.txt

Each number of nodes gets its optimum within the starting shape (`stand.trees.fit_shape`). The predicted tokens per
step are those that the kept slots earned in the same run: an estimate in favour of the fitted shape, to be confirmed
on other problems with `throughput.py`. Progress goes to stderr, a table to stdout; the last stdout line is one JSON
document with the counts, the shapes and the settings. After SIGINT or SIGTERM the shapes are fitted to the problems
that were finished.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
import torch
from measuring.interruption import Interruption, run_command
from measuring.option_types import count_list, positive_integer, worded
from measuring.output_file import check_writable
from measuring.progress import Progress, say
from measuring.setup import add_options, fill_defaults, load_model, load_tasks, prompt_ids, sampling_for
from measuring.text_table import format_table
from measuring.trajectories import draw_with_engine

import stand
from stand.trees import TreeShape, fit_shape


class SlotCounts:
    """How often each slot of the starting shape was accepted, over the problems that were drawn so far."""

    def __init__(self, start: TreeShape) -> None:
        self.start = start
        self.stats = stand.Stats()

    @property
    def num_steps(self) -> int:
        """Row-steps."""
        return self.stats.num_steps

    @property
    def accepted(self) -> np.ndarray:
        """int64[N], by slot."""
        counts = np.zeros(self.start.num_nodes, dtype=np.int64)
        counts[: len(self.stats.accepted_by_slot)] = self.stats.accepted_by_slot
        return counts

    def draw(self, arguments: argparse.Namespace, interruption: Interruption) -> None:
        """Trajectories of every problem, drafted with the starting shape."""
        tasks = load_tasks(arguments)
        sampling = sampling_for(arguments, arguments.trajectories)
        say(f"{arguments.model}: loading")
        model, tokenizer = load_model(arguments)
        drafter = stand.FixedShapeDrafter(shape=self.start, kind=arguments.draft_kind)
        engine = stand.wrap(model, tokenizer, drafter=drafter, verifier=arguments.verifier)
        progress = Progress(len(tasks))
        for index, task in enumerate(tasks):
            prompt = prompt_ids(tokenizer, task, arguments.instruction)
            drawn = draw_with_engine(engine, prompt, arguments.trajectories, sampling, problem=index, draft=True)
            self.stats += drawn.stats
            rate = f"{drawn.stats.mean_acceptance_length:.2f} tokens/step"
            progress.add(1, f"problem {index + 1} of {len(tasks)}: {rate}")
            interruption.check()


def fitted_row(num_nodes: int, counts: np.ndarray, num_steps: int, start: TreeShape) -> tuple[TreeShape, float]:
    """(the best shape of so many nodes, the tokens per step that its slots earned)."""
    kept = fit_shape(counts, start, num_nodes)
    return kept, 1.0 + counts[slots_of(kept, start)].sum() / num_steps


def slots_of(kept: TreeShape, start: TreeShape) -> np.ndarray:
    """The slots of `start` that the slots of a fitted shape are."""
    ranks, slots = kept.ranks, np.zeros(kept.num_nodes, dtype=np.int64)
    for slot in range(1, kept.num_nodes):
        siblings = np.flatnonzero(start.parents == slots[kept.parents[slot]])
        slots[slot] = siblings[ranks[slot]]
    return slots


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--trajectories", type=positive_integer, default=4, help="per problem (%(default)s)")
    parser.add_argument(
        "--nodes", type=count_list, default=[80], metavar="N,N,...", help="nodes, the root included (80)"
    )
    parser.add_argument(
        "--start",
        type=worded(TreeShape.parse),
        default=TreeShape.start(),
        help="shape to choose slots from: `paper`, `branching:4,2,1` and the like (default: 625 slots)",
    )
    parser.add_argument(
        "--draft-kind",
        choices=("sampled", "deterministic"),
        default="sampled",
        help="how children are chosen (%(default)s)",
    )
    parser.add_argument("--verifier", default="traversal", help="rule by name (%(default)s)")
    parser.add_argument("--save", type=Path, help="write the last fitted shape as text for --shape")
    arguments = parser.parse_args(command_line)
    fill_defaults(arguments)
    if max(arguments.nodes) > arguments.start.num_nodes:
        parser.error(
            f"--nodes must be at most {arguments.start.num_nodes}, the nodes of --start, got {arguments.nodes}"
        )
    return arguments


def run(arguments: argparse.Namespace, interruption: Interruption) -> None:
    check_writable(arguments.save, "--save")
    torch.set_num_threads(arguments.threads)
    counts = SlotCounts(arguments.start)
    try:
        counts.draw(arguments, interruption)
    finally:
        if counts.num_steps > 0:
            finish(arguments, counts)


def finish(arguments: argparse.Namespace, counts: SlotCounts) -> None:
    """Shapes fitted to the problems that were drawn, be it all or not."""
    rows, shapes = [], {}
    for num_nodes in arguments.nodes:
        kept, tokens_per_step = fitted_row(num_nodes, counts.accepted, counts.num_steps, arguments.start)
        shapes[num_nodes] = {"shape": str(kept), "predicted_tokens_per_step": tokens_per_step}
        by_depth = " ".join(str(number) for number in np.bincount(kept.depths))
        rows.append([num_nodes, tokens_per_step, by_depth])
    print(format_table(("nodes", "predicted tok/step", "slots by depth, root first"), rows))
    figures = {"num_steps": counts.num_steps, "accepted_by_slot": counts.accepted.tolist()}
    document = {"settings": vars(arguments), **figures, "fitted": shapes}
    print(json.dumps(document, default=str), flush=True)  # paths and shapes as text
    if arguments.save is not None:
        arguments.save.write_text(shapes[arguments.nodes[-1]]["shape"] + "\n", encoding="utf-8")
        say(f"wrote {arguments.save}")


def main() -> int:
    arguments = read_arguments()
    return run_command("fit_shape", lambda interruption: run(arguments, interruption))


if __name__ == "__main__":
    sys.exit(main())
