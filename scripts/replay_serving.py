"""Replays recorded streams through the doors of serving engines, many rows at once, without a model.

    python scripts/replay_serving.py FILE... --tokenizer tokenizer.json --door vllm suffix suffix-most --size 4 8 16
    python scripts/replay_serving.py FILE... --tokenizer tokenizer.json --door sglang --size 8 12 32 --rows 4

Recordings are decoded in order, `--rows` at a time; a row that ends makes room for the next recording, and nothing is
forgotten between problems. `vllm` is `stand.plugins.vllm.LookupProposer` and `--size` its chains' tokens; `suffix` is
Arctic's suffix decoding (arctic-inference) with vLLM's settings, `suffix-most` with four times the match's length and
no floor. `sglang` is `stand.plugins.sglang.LookupCorpus` and `--size` the nodes per request; `--corpus module:Class`
puts another one in its place, such as sglang.srt.speculative.cpp_ngram.ngram_corpus:NgramCorpus.

Tokens per row-step count every step of every row but the first token, which the prompt gives. Times are CPU time of the
engine's calls in this thread; what a door does in threads of its own is not seen. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
from measuring.progress import Progress, say
from measuring.serving_doors import CorpusDoor, Door, Stream, SuffixDoor, VllmDoor
from measuring.text_table import format_table
from tokenizers import Tokenizer
from workloads.recordings import Recording, Selection, read_recordings

DOORS = ("vllm", "suffix", "suffix-most", "sglang")
OURS = "stand.plugins.sglang:LookupCorpus"


@dataclass(frozen=True, slots=True)
class Result:
    """One door on one file."""

    file: str
    door: str
    size: int
    rows: int
    tokens_per_row_step: float
    drafted_per_row_step: float
    us_per_row_step: float  # all calls together
    us_per_row_median: float  # of steps with all rows
    slowest_step_us: float
    num_row_steps: int


def replay(door: Door, recordings: list[Recording], *, num_rows: int) -> tuple[int, int, int, list[float], list[float]]:
    """(row-steps, tokens, drafted tokens, microseconds per row of steps with all rows, microseconds of all steps)."""
    waiting = [
        Stream(number, np.concatenate([one.prompt, one.tokens]).astype(np.int32), len(one.prompt), len(one.prompt) + 1)
        for number, one in enumerate(recordings)
    ]
    waiting.reverse()
    live: list[Stream] = []
    num_row_steps = num_tokens = num_drafted = 0
    full, every = [], []
    while waiting or live:
        while waiting and len(live) < num_rows:
            live.append(waiting.pop())
        outcome = door.step(live)
        every.append(outcome.microseconds)
        if len(live) == num_rows:
            full.append(outcome.microseconds / num_rows)
        num_row_steps += len(live)
        num_drafted += sum(outcome.drafted)
        for one, accepted in zip(live, outcome.accepted, strict=True):
            one.num_new = min(accepted + 1, len(one.tokens) - one.end)
            one.end += one.num_new
            num_tokens += one.num_new
        for place in range(len(live) - 1, -1, -1):
            if live[place].end == len(live[place].tokens):
                door.drop(place, live)
                last = live.pop()
                if place < len(live):
                    live[place] = last
    return num_row_steps, num_tokens, num_drafted, full, every


def make_door(name: str, size: int, options: argparse.Namespace, recordings: list[Recording]) -> Door:
    if name == "vllm":
        longest = max(len(one.prompt) + len(one.tokens) for one in recordings)
        return VllmDoor(size, num_rows=options.rows, longest=longest, options=json.loads(options.options))
    if name == "sglang":
        depth = options.depth if options.depth is not None else 12 + size
        return CorpusDoor(options.corpus, size, depth=depth)
    most = name == "suffix-most"
    return SuffixDoor(size, factor=4.0 if most else 1.0, floor=0.0 if most else 0.1)


def run(options: argparse.Namespace) -> list[Result]:
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    selection = Selection(options.every, options.max_problems, options.samples, options.max_tokens)
    progress = Progress(len(options.files) * len(options.door) * len(options.size))
    results = []
    for file in options.files:
        recordings = read_recordings(file, tokenizer, selection)
        for name, size in product(options.door, options.size):
            door = make_door(name, size, options, recordings)
            steps, tokens, drafted, full, every = replay(door, recordings, num_rows=options.rows)
            shown = options.corpus if name == "sglang" and options.corpus != OURS else name
            result = Result(
                file=file.name,
                door=shown,
                size=size,
                rows=options.rows,
                tokens_per_row_step=tokens / steps,
                drafted_per_row_step=drafted / steps,
                us_per_row_step=sum(every) / steps,
                us_per_row_median=float(np.median(full or every)),
                slowest_step_us=max(every),
                num_row_steps=steps,
            )
            results.append(result)
            progress.add(1, f"{file.name} {shown} {size}: {result.tokens_per_row_step:.3f} tokens per row-step")
    return results


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--tokenizer", required=True, type=Path, help="tokenizer.json")
    parser.add_argument("--door", nargs="+", choices=DOORS, default=["vllm"])
    parser.add_argument("--size", nargs="+", type=int, default=[8], help="tokens of a chain, or nodes per request")
    parser.add_argument("--rows", type=int, default=16, help="rows decoded side by side")
    parser.add_argument("--options", default="{}", help="`vllm`: options as a JSON object (ServingOptions)")
    parser.add_argument("--corpus", default=OURS, help="`sglang`: the class, module:Class")
    parser.add_argument("--depth", type=int, help="`sglang`: tokens shown of each text (default: 12 + nodes)")
    parser.add_argument("--samples", type=int, help="at most so many samples per problem")
    parser.add_argument("--max-problems", type=int, help="at most so many problems per file")
    parser.add_argument("--every", type=int, default=1, help="every n-th problem")
    parser.add_argument("--max-tokens", type=int, help="cut samples to so many tokens")
    parsed = parser.parse_args(arguments)
    if min(*parsed.size, parsed.rows) < 1:
        parser.error("--size and --rows must be at least 1")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    try:
        results = run(parse(arguments))
    except (ValueError, OSError, ImportError) as error:
        say(f"replay_serving: {error}")
        return 2
    header = ["file", "door", "size", "rows", "tokens/row-step", "drafted", "us/row-step", "median", "slowest step us"]
    rows = [
        [r.file, r.door, r.size, r.rows, f"{r.tokens_per_row_step:.3f}", r.drafted_per_row_step, r.us_per_row_step]
        + [r.us_per_row_median, r.slowest_step_us]
        for r in results
    ]
    print(format_table(header, rows))
    print(json.dumps({"results": [asdict(result) for result in results]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
