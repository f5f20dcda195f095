"""What the lookup tree should learn from: the target's laws at every scored node, or the committed tokens alone.

    python scripts/compare_evidence.py                     # bundled model, generated problems
    python scripts/compare_evidence.py --model Qwen/Qwen2.5-7B-Instruct --problems mine.jsonl

Both arms draw the same problems with the same seeds, from an empty tree each; a law's ten best tokens cost nothing more
to get, as the forward has scored them. Tokens per step of each arm by number of the problem, then of all; the last line
of stdout is one JSON document. Recordings hold no laws, so `replay.py` can only measure the second arm.
"""

from __future__ import annotations

import argparse
import json

import torch
from measuring.progress import Progress
from measuring.setup import add_options, fill_defaults, load_model, load_tasks, prompt_ids, sampling_for
from measuring.text_table import format_table
from measuring.token_drafter import TokenDrafter
from measuring.trajectories import draw_with_engine

import stand
from stand.drafters.blended import BlendedDrafter
from stand.trees import BlendedLookup

ARMS = {"laws": BlendedDrafter, "tokens": TokenDrafter}


def draw(options: argparse.Namespace, model, tokenizer, arm: str, budget: int) -> list[stand.Stats]:
    """Every problem's trajectories with one arm."""
    drafter = ARMS[arm](BlendedLookup(), budget=budget)
    engine = stand.wrap(model, tokenizer, drafter=drafter)
    stats = []
    for problem, task in enumerate(load_tasks(options)):
        prompt, sampling = prompt_ids(tokenizer, task, options.instruction), sampling_for(options, options.trajectories)
        drawn = draw_with_engine(engine, prompt, options.trajectories, sampling, problem=problem, draft=True)
        stats.append(drawn.stats)
    return stats


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.set_defaults(num_problems=8)
    parser.add_argument("--trajectories", type=int, default=8, help="per problem")
    parser.add_argument("--budget", nargs="+", type=int, default=[8, 32, 80], help="nodes of all rows together")
    options = parser.parse_args()
    fill_defaults(options)
    return options


def main() -> None:
    options = read_arguments()
    torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options)
    rows, results = [], []
    progress = Progress(len(options.budget) * len(ARMS))
    for budget in options.budget:
        for arm in ARMS:
            stats = draw(options, model, tokenizer, arm, budget)
            by_problem = [one.mean_acceptance_length for one in stats]
            whole = sum(stats, stand.Stats()).mean_acceptance_length
            progress.add(1, f"{budget} nodes, {arm}: {whole:.2f} tokens/step")
            rows.append([budget, arm, *by_problem, whole])
            results.append({"budget": budget, "arm": arm, "by_problem": by_problem, "tokens_per_step": whole})
    print(format_table(["nodes", "learns from", *map(str, range(1, len(rows[0]) - 2)), "all"], rows))
    print(json.dumps({"results": results, "settings": vars(options)}))


if __name__ == "__main__":
    main()
