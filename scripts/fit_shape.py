"""Fit the shape of drafts to a model: run with a large shape, count which slots get accepted, keep the best ones.

    python scripts/fit_shape.py                                      # bundled model, generated problems
    python scripts/fit_shape.py --model PATH --problems mine.jsonl --nodes 16,32,80
    python scripts/throughput.py --shape "$(cat shape.txt)"          # after --save shape.txt

Each number of nodes gets its optimum within the starting shape (`stand.trees.fit_shape`). The predicted tokens per
step are those that the kept slots earned in the same run: an estimate in favour of the fitted shape, to be confirmed
on other problems with `throughput.py`. Progress goes to stderr, a table to stdout; the last stdout line is one JSON
document with the counts, the shapes and the settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from measuring.text_table import format_table
from measuring.trajectories import draw_with_engine
from throughput import (
    DTYPES,
    REASONER,
    count_list,
    fill_defaults,
    load_model,
    load_tasks,
    positive_integer,
    prompt_ids,
    report,
    sampling_for,
)

import stand
from stand.trees import TreeShape, fit_shape


def count_slots(arguments: argparse.Namespace) -> tuple[np.ndarray, int]:
    """(int64[N] how often each slot of the starting shape was accepted, number of row-steps)."""
    model, tokenizer = load_model(arguments)
    drafter = stand.FixedShapeDrafter(shape=arguments.start, kind=arguments.draft_kind)
    engine = stand.wrap(model, tokenizer, drafter=drafter, verifier=arguments.verifier)
    tasks, sampling = load_tasks(arguments), sampling_for(arguments, arguments.trajectories)
    total = stand.Stats()
    for index, task in enumerate(tasks):
        prompt = prompt_ids(tokenizer, task, arguments.instruction)
        drawn = draw_with_engine(engine, prompt, arguments.trajectories, sampling, problem=index, draft=True)
        total += drawn.stats
        report(f"problem {index + 1} of {len(tasks)}: {drawn.stats.mean_acceptance_length:.2f} tokens/step")
    counts = np.zeros(arguments.start.num_nodes, dtype=np.int64)
    counts[: len(total.accepted_by_slot)] = total.accepted_by_slot
    return counts, total.num_steps


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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(REASONER), help="folder or hub id (default: the bundled model)")
    parser.add_argument("--problems", help="jsonl file or hub dataset with fields problem, answer")
    parser.add_argument("--num-problems", type=positive_integer, help="use the first so many problems only")
    parser.add_argument("--trajectories", type=positive_integer, default=4, help="per problem")
    parser.add_argument("--rows", type=int, help="rows decoded together, 0 for all (default: 4 on a CPU, else all)")
    parser.add_argument("--nodes", type=count_list, default=[80], metavar="N,N,...", help="nodes, the root included")
    parser.add_argument("--start", type=TreeShape.parse, default=TreeShape.start(), help="shape to choose slots from")
    parser.add_argument("--draft-kind", choices=("sampled", "deterministic"), default="sampled")
    parser.add_argument("--verifier", default="traversal")
    parser.add_argument("--max-new-tokens", type=positive_integer)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--instruction", help="text appended to every problem")
    parser.add_argument("--save", type=Path, help="write the last fitted shape as text for --shape")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=positive_integer, help="CPU threads (default: 1 for the bundled model)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(command_line)
    fill_defaults(arguments)
    if max(arguments.nodes) > arguments.start.num_nodes:
        parser.error(
            f"--nodes must be at most {arguments.start.num_nodes}, the nodes of --start, got {arguments.nodes}"
        )
    return arguments


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    counts, num_steps = count_slots(arguments)
    rows, shapes = [], {}
    for num_nodes in arguments.nodes:
        kept, tokens_per_step = fitted_row(num_nodes, counts, num_steps, arguments.start)
        shapes[num_nodes] = {"shape": str(kept), "predicted_tokens_per_step": tokens_per_step}
        by_depth = " ".join(str(number) for number in np.bincount(kept.depths))
        rows.append([num_nodes, tokens_per_step, by_depth])
    if arguments.save is not None:
        arguments.save.write_text(shapes[arguments.nodes[-1]]["shape"] + "\n", encoding="utf-8")
        report(f"wrote {arguments.save}")
    print(format_table(("nodes", "predicted tok/step", "slots by depth, root first"), rows))
    settings = {
        name: value if isinstance(value, int | float) else str(value) for name, value in vars(arguments).items()
    }
    document = {"settings": settings, "num_steps": num_steps, "accepted_by_slot": counts.tolist(), "fitted": shapes}
    print(json.dumps(document))


def main() -> int:
    arguments = read_arguments()
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        report(f"fit_shape: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
