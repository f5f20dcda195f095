"""Replay recorded token streams without a model: how many tokens would a step have given?

    python scripts/replay.py FILE... --tokenizer tokenizer.json --drafter lookup stand --budget 8 80 --setting same \
        --samples 8 --max-problems 8 --every 4 --max-tokens 16000

FILE is JSONL, .gz or not, with `problem_id`, `text` or `token_ids`, and `problem` (the prompt). The samples of a
problem are decoded one after the other. At every step the drafter sees prompt and tokens so far and proposes at most
`--budget` nodes; the longest path that equals the recording is accepted and one more token follows. tau is tokens per
step; a sample's first token comes from the prompt and is not counted. For a deterministic draft this is an unbiased
estimate of what a lossless verifier accepts on that model.

Recordings hold no logits, so every drafter learns from counts alone here; with a model, `lookup` and `stand` learn the
target's own laws and do better. Settings: `alone` forgets before every sample, `same` before every problem, `all`
never. Times are CPU time of calls from Python.

Columns beside: `last sample` is tau of the samples with the largest number, of the problems that have so many; `nodes`
is the mean size of a draft, `draft us` the median time of a draft and `p99` its 99th percentile, `coverage` the share
of steps with a draft. `calibration` is the largest difference between how likely paths were thought and how often they
were accepted, over tenths of that probability that hold at least 500 nodes; a dash where the drafter states none.
`bytes/token` is the memory at the end over the tokens learned since all was forgotten. The table goes to stdout,
progress to stderr; the last stdout line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
from measuring.idle_options import refuse_idle
from measuring.interruption import run_and_report
from measuring.option_types import existing_file, named, picture_file, positive_integer, probability
from measuring.progress import Progress
from measuring.text_table import format_table
from replay_parts.drafters import ArcticReplay, ReplayDrafter, make_drafter
from replay_parts.selection import add_selection, selection_of
from replay_parts.walk import Tally, replay_one
from workloads.recordings import Recording, read_recordings, read_tokenizer

from stand.trees import BlendedLookup, vocabulary_fingerprint

SETTINGS = ("alone", "same", "all")
DRAFTERS = ("lookup", "stand", "prompt-lookup", "arctic", "arctic-gated")
LEAST_IN_BIN = 500


@dataclass(frozen=True, slots=True)
class Result:
    """One drafter with one budget and setting on one file. Bytes and calibration are None where unknown."""

    drafter: str
    budget: int
    setting: str
    file: str
    tau: float
    tau_by_sample: list[float]
    mean_nodes: float
    draft_us_median: float
    draft_us_p99: float
    learn_us_per_token: float
    bytes_per_token: float | None
    coverage: float  # share of steps with a draft
    accepted_by_depth: list[float]  # per step
    calibration: list[tuple[float, float, int]] | None  # per bin of path probability: expected, accepted, nodes
    calibration_error: float | None  # the largest, among bins of at least 500 nodes
    num_tokens: int
    num_steps: int


def replay(drafter: ReplayDrafter, recordings: list[Recording], *, budget: int, setting: str) -> Tally:
    """Decode the recordings in order."""
    tally = Tally()
    drafter.forget()
    last_problem = recordings[0].problem
    for recording in recordings:
        if setting == "alone" or (setting == "same" and recording.problem != last_problem):
            drafter.forget()
            tally.num_held = 0
        last_problem = recording.problem
        replay_one(drafter, recording, budget, tally)
    return tally


def summarise(tally: Tally, drafter: ReplayDrafter, empty_bytes: int | None) -> dict:
    num_tokens, num_steps = sum(tally.tokens.values()), sum(tally.steps.values())
    used = tally.in_bin > 0
    expected = tally.expected[used] / tally.in_bin[used]
    reached = tally.reached[used] / tally.in_bin[used]
    many = tally.in_bin[used] >= LEAST_IN_BIN
    knows_chances = bool(used.any())
    depths = int(np.max(np.flatnonzero(tally.accepted), initial=-1)) + 1
    return {
        "tau": num_tokens / num_steps,
        "tau_by_sample": [tally.tokens[sample] / max(1, tally.steps[sample]) for sample in sorted(tally.tokens)],
        "mean_nodes": tally.num_nodes / num_steps,
        "draft_us_median": float(np.median(tally.draft_us)),
        "draft_us_p99": float(np.percentile(tally.draft_us, 99)),
        "learn_us_per_token": tally.learn_us / tally.num_learned,
        "bytes_per_token": None if empty_bytes is None else (drafter.nbytes - empty_bytes) / tally.num_held,
        "coverage": tally.num_drafts / num_steps,
        "accepted_by_depth": (tally.accepted[:depths] / num_steps).tolist(),
        "calibration": list(zip(expected.tolist(), reached.tolist(), tally.in_bin[used].tolist(), strict=True))
        if knows_chances
        else None,
        "calibration_error": float(np.max(np.abs(expected - reached)[many], initial=0.0)) if knows_chances else None,
        "num_tokens": num_tokens,
        "num_steps": num_steps,
    }


def table(results: list[Result]) -> str:
    header = ["file", "setting", "drafter", "budget", "tau", "last sample", "nodes", "draft us", "p99"]
    header += ["learn us/token", "bytes/token", "coverage", "calibration"]
    rows = [
        [r.file, r.setting, r.drafter, r.budget, f"{r.tau:.3f}", r.tau_by_sample[-1], r.mean_nodes, r.draft_us_median]
        + [r.draft_us_p99, r.learn_us_per_token, r.bytes_per_token, r.coverage, r.calibration_error]
        for r in results
    ]
    return format_table(header, rows)


def plot(results: list[Result], path: Path) -> None:
    """tau against budget, one panel per file and setting; where chances are known, expected against accepted below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(r.file, r.setting) for r in results})
    figure, axes = pyplot.subplots(2, len(panels), figsize=(4 * len(panels), 7), squeeze=False)
    for column, panel in enumerate(panels):
        chosen = [r for r in results if (r.file, r.setting) == panel]
        for name in sorted({r.drafter for r in chosen}):
            points = sorted((r.budget, r.tau) for r in chosen if r.drafter == name)
            axes[0][column].plot(*zip(*points, strict=True), marker="o", label=name)
        for result in chosen:
            if result.calibration is not None:
                expected, reached, _ = zip(*result.calibration, strict=True)
                axes[1][column].plot(expected, reached, marker=".", label=f"{result.drafter}, {result.budget} nodes")
        axes[0][column].set(title=f"{panel[0]}, {panel[1]}", xlabel="budget, nodes", ylabel="tau", xscale="log")
        axes[1][column].plot([0, 1], [0, 1], color="grey", linewidth=0.5)
        axes[1][column].set(xlabel="path probability", ylabel="accepted")
        axes[0][column].legend()
        axes[1][column].legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="+", type=existing_file, metavar="FILE", help="recordings: .jsonl, also compressed"
    )
    parser.add_argument("--tokenizer", required=True, type=existing_file, help="tokenizer.json")
    parser.add_argument(
        "--drafter", nargs="+", choices=DRAFTERS, default=["lookup", "stand"], help="default: lookup stand"
    )
    parser.add_argument(
        "--budget",
        nargs="+",
        type=positive_integer,
        default=[8, 80],
        help="nodes per draft, the root not counted (8 80)",
    )
    parser.add_argument(
        "--setting",
        nargs="+",
        choices=SETTINGS,
        default=["same"],
        help="all: nothing is forgotten; same: everything at each problem (default: same)",
    )
    add_selection(parser)
    parser.add_argument("--lookup", type=existing_file, help="file that `lookup` starts from (scripts/train_lookup.py)")
    parser.add_argument(
        "--floor", type=probability, default=0.0, help="`lookup`: no node that is less likely than this (%(default)s)"
    )
    parser.add_argument("--max-bytes", type=positive_integer, help="`lookup`: memory cap")
    parser.add_argument("--plot", type=picture_file, help="write tau against budget to this picture")
    parsed = parser.parse_args(arguments)
    parsed.selection = selection_of(parser, parsed)
    refuse_idle(parser, parsed, "drafter", dict.fromkeys(("lookup", "floor", "max_bytes"), {"lookup"}))
    if parsed.lookup is not None and parsed.max_bytes is not None:
        parser.error("--max-bytes must not be given with --lookup; a file brings its own cap")
    return parsed


def run(options: argparse.Namespace) -> Iterator[Result]:
    """Every drafter with every budget and setting on every file, as each is finished."""
    tokenizer = read_tokenizer(options.tokenizer)
    if options.lookup is not None:  # once, so that a file of another tokenizer is refused before anything is replayed
        with named("--lookup"):
            BlendedLookup.load(options.lookup, fingerprint=vocabulary_fingerprint(tokenizer.get_vocab()))
    if any(name.startswith("arctic") for name in options.drafter):
        ArcticReplay()  # is it installed?
    progress = Progress(len(options.files) * len(options.setting) * len(options.drafter) * len(options.budget))
    for file in options.files:
        recordings = read_recordings(file, tokenizer, options.selection)
        for setting, name in product(options.setting, options.drafter):
            drafter = make_drafter(name, lookup=options.lookup, floor=options.floor, max_bytes=options.max_bytes)
            empty_bytes = drafter.nbytes
            for budget in options.budget:
                tally = replay(drafter, recordings, budget=budget, setting=setting)
                result = Result(name, budget, setting, file.name, **summarise(tally, drafter, empty_bytes))
                progress.add(1, f"{file.name} {setting} {name} {budget}: tau {result.tau:.3f}")
                yield result


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    draw = None if options.plot is None else partial(plot, path=options.plot)
    return run_and_report("replay", run(options), report, draw)


def report(results: list[Result]) -> None:
    print(table(results))
    print(json.dumps({"results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    sys.exit(main())
