"""Replay successive checkpoints of one model as epochs: what is a lookup worth that is kept from epoch to epoch?

    python scripts/replay_epochs.py FILE --tokenizer tokenizer.json --fade 0.9 0.95 1 --budget 8 32 --max-tokens 4000

Reinforcement learning asks the same prompts again at every epoch, of a model that has changed a little. FILE is a
recording as for `replay.py` whose records name their checkpoint in `model`. `--checkpoint` is an expression whose first
group is a number in that name: checkpoints follow each other by it, and records without it are left out, as are
records marked `loop`. One epoch is every problem once, decoded one after the other as in `replay.py`.

Lookups: `fresh` forgets before every epoch, `kept` never does, `renamed` is kept, but a problem gets another scope at
each epoch. tau is tokens per step. Problems with even and with odd numbers are counted apart, so that a choice made on
the one half can be judged on the other. The table goes to stdout, progress to stderr; the last stdout line is one JSON
document: `tau` and `num_tokens` are of all epochs but the first, `tau_by_epoch` of each.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
from measuring.interruption import run_and_report
from measuring.option_types import existing_file, positive_integer, share
from measuring.progress import Progress, say
from measuring.text_table import format_table
from replay_parts.drafters import BlendedReplay
from replay_parts.walk import Tally, replay_one
from tokenizers import Tokenizer
from workloads.recordings import SHORTEST, Recording, encode, read_records, read_tokenizer, record_tokens

LOOKUPS = ("fresh", "kept", "renamed")
HALVES = ("even", "odd")


@dataclass(frozen=True, slots=True)
class Result:
    """One lookup with one fade and budget, on one half of the problems."""

    lookup: str
    fade: float
    budget: int
    half: str
    tau: float  # of all epochs but the first
    tau_by_epoch: list[float]
    num_tokens: int  # of all epochs but the first


def read_epochs(
    path: Path, tokenizer: Tokenizer, checkpoint: re.Pattern[str], max_tokens: int | None
) -> tuple[list[float], list[list[Recording]]]:
    """(numbers of the checkpoints, ascending; per checkpoint its recordings, by problem).

    Raises ValueError where fewer than two checkpoints are named.
    """
    problems: dict[object, int] = {}
    prompts: dict[object, np.ndarray] = {}
    by_number: dict[float, list[Recording]] = {}
    for record in read_records(path):
        model = record.get("model")
        found = checkpoint.search(model) if isinstance(model, str) else None
        if found is None or record.get("loop"):
            continue
        key = record.get("problem_id")
        if key is None:
            raise ValueError(f"{path} must have problem_id in every record, got fields {sorted(record)}")
        if key not in problems:
            problems[key], prompts[key] = len(problems), encode(tokenizer, record.get("problem") or "")
        tokens = record_tokens(record, tokenizer)[:max_tokens]
        if len(tokens) >= SHORTEST:
            one = Recording(problems[key], 0, prompts[key], tokens)
            by_number.setdefault(number_of(found), []).append(one)
    if len(by_number) < 2:
        raise ValueError(
            f"{path} must name at least two checkpoints that {checkpoint.pattern!r} finds in `model`, "
            f"got {len(by_number)}; pass --checkpoint"
        )
    numbers = sorted(by_number)
    return numbers, [sorted(by_number[number], key=lambda one: one.problem) for number in numbers]


def number_of(found: re.Match[str]) -> float:
    """Raises ValueError where the first group is no number."""
    try:
        return float(found[1])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"--checkpoint must have a number in its first group, got {found[1]!r} in {found.string!r}; "
            r"write (\d+) there"
        ) from error


def replay_epochs(epochs: list[list[Recording]], lookup: str, fade: float, budget: int) -> list[Tally]:
    """What was counted of the even problems, and of the odd ones; samples are numbered by epoch."""
    drafter = BlendedReplay(fade=fade)
    tallies = [Tally(), Tally()]
    num_problems = 1 + max(one.problem for epoch in epochs for one in epoch)
    for number, epoch in enumerate(epochs):
        if lookup == "fresh":
            drafter.forget()
        for one in epoch:
            name = one.problem + (number * num_problems if lookup == "renamed" else 0)
            replay_one(drafter, Recording(name, number, one.prompt, one.tokens), budget, tallies[one.problem % 2])
    return tallies


def summarise(tally: Tally) -> dict:
    later = [epoch for epoch in tally.tokens if epoch > 0]
    num_tokens = sum(tally.tokens[epoch] for epoch in later)
    return {
        "tau": num_tokens / max(1, sum(tally.steps[epoch] for epoch in later)),
        "tau_by_epoch": [tally.tokens[epoch] / max(1, tally.steps[epoch]) for epoch in sorted(tally.tokens)],
        "num_tokens": num_tokens,
    }


def table(results: list[Result]) -> str:
    header = ["lookup", "fade", "budget", "half", "tau after the first epoch", "tau by epoch"]
    rows = [
        [r.lookup, f"{r.fade:g}", r.budget, r.half, f"{r.tau:.3f}", " ".join(f"{tau:.2f}" for tau in r.tau_by_epoch)]
        for r in results
    ]
    return format_table(header, rows)


def expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"must be a regular expression, got {text!r} ({error})") from error


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=existing_file, metavar="FILE", help="recordings: .jsonl, also compressed")
    parser.add_argument("--tokenizer", required=True, type=existing_file, help="tokenizer.json")
    parser.add_argument(
        "--checkpoint",
        type=expression,
        default=re.compile(r"checkpoint-(\d+)"),
        metavar="EXPRESSION",
        help=r"regular expression whose group is a checkpoint's number (checkpoint-(\d+))",
    )
    parser.add_argument(
        "--lookup",
        nargs="+",
        choices=LOOKUPS,
        default=list(LOOKUPS),
        help="what is kept over checkpoints (default: all ways)",
    )
    parser.add_argument(
        "--fade", nargs="+", type=share, default=[0.95], help="how fast old evidence fades (default: 0.95)"
    )
    parser.add_argument(
        "--budget", nargs="+", type=positive_integer, default=[8], help="nodes per draft, the root not counted (8)"
    )
    parser.add_argument("--max-tokens", type=positive_integer, help="cut samples to so many tokens")
    parsed = parser.parse_args(arguments)
    if parsed.max_tokens is not None and parsed.max_tokens < SHORTEST:
        parser.error(f"--max-tokens must be at least {SHORTEST}, got {parsed.max_tokens}; shorter samples are skipped")
    if parsed.checkpoint.groups < 1:
        parser.error(f"--checkpoint must have a group around the number, got {parsed.checkpoint.pattern!r}")
    return parsed


def run(options: argparse.Namespace, numbers: list[float]) -> Iterator[Result]:
    """The figures of both halves, as each way is finished; `numbers` takes those of the checkpoints."""
    tokenizer = read_tokenizer(options.tokenizer)
    found, epochs = read_epochs(options.file, tokenizer, options.checkpoint, options.max_tokens)
    numbers.extend(found)
    say(f"{sum(map(len, epochs))} recordings of checkpoints {', '.join(f'{number:g}' for number in numbers)}")
    progress = Progress(len(options.lookup) * len(options.fade) * len(options.budget))
    for budget, lookup, fade in product(options.budget, options.lookup, options.fade):
        tallies = replay_epochs(epochs, lookup, fade, budget)
        both = [
            Result(lookup, fade, budget, half, **summarise(tally))
            for half, tally in zip(HALVES, tallies, strict=True)
            if tally.tokens
        ]
        said = ", ".join(f"{one.half} {one.tau:.3f}" for one in both)
        progress.add(1, f"{lookup}, fade {fade:g}, {budget} nodes: tau {said}")
        yield from both


def main(arguments: list[str] | None = None) -> int:
    options, numbers = parse(arguments), []

    def report(results: list[Result]) -> None:
        print(table(results))
        print(json.dumps({"checkpoints": numbers, "results": [asdict(result) for result in results]}))

    return run_and_report("replay_epochs", run(options, numbers), report)


if __name__ == "__main__":
    sys.exit(main())
