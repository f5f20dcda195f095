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
from measuring.text_table import format_table
from measuring.token_drafter import TokenDrafter
from measuring.trajectories import Sampling, draw_with_engine
from throughput import REASONER, load_model, load_tasks, prompt_ids

import stand
from stand.drafters.blended import BlendedDrafter
from stand.trees import BlendedLookup

ARMS = {"laws": BlendedDrafter, "tokens": TokenDrafter}


def draw(options: argparse.Namespace, model, tokenizer, arm: str, budget: int) -> list[stand.Stats]:
    """Every problem's trajectories with one arm."""
    drafter = ARMS[arm](BlendedLookup(), budget=budget)
    engine = stand.wrap(model, tokenizer, drafter=drafter)
    sampling = Sampling(options.rows, options.max_new_tokens, options.temperature, None, None, options.seed)
    stats = []
    for problem, task in enumerate(load_tasks(options)):
        prompt = prompt_ids(tokenizer, task, "")
        drawn = draw_with_engine(engine, prompt, options.trajectories, sampling, problem=problem, draft=True)
        stats.append(drawn.stats)
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(REASONER), help="folder or hub id (default: the bundled model)")
    parser.add_argument("--problems", help="jsonl file with fields problem, answer")
    parser.add_argument("--num-problems", type=int, default=8)
    parser.add_argument("--trajectories", type=int, default=8, help="per problem")
    parser.add_argument("--rows", type=int, default=4, help="decoded together")
    parser.add_argument("--budget", nargs="+", type=int, default=[8, 32, 80], help="nodes of all rows together")
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    model, tokenizer = load_model(options)
    rows, results = [], []
    for budget in options.budget:
        for arm in ARMS:
            stats = draw(options, model, tokenizer, arm, budget)
            by_problem = [one.mean_acceptance_length for one in stats]
            whole = sum(stats, stand.Stats()).mean_acceptance_length
            rows.append([budget, arm, *by_problem, whole])
            results.append({"budget": budget, "arm": arm, "by_problem": by_problem, "tokens_per_step": whole})
    print(format_table(["nodes", "learns from", *map(str, range(1, len(rows[0]) - 2)), "all"], rows))
    print(json.dumps({"results": results, "settings": vars(options)}))


if __name__ == "__main__":
    main()
