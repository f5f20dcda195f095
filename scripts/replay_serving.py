"""Replays recorded streams through the doors of serving engines, many rows at once, without a model.

    python scripts/replay_serving.py FILE... --tokenizer tokenizer.json --door vllm suffix suffix-most --size 4 8 16
    python scripts/replay_serving.py FILE... --tokenizer tokenizer.json --door sglang --size 8 12 32 --rows 4

Recordings are decoded in order, `--rows` at a time; a row that ends makes room for the next recording, and nothing is
forgotten between problems. `vllm` is `stand.plugins.vllm.LookupProposer` and `--size` its chains' tokens; `suffix` is
Arctic's suffix decoding (arctic-inference) with vLLM's settings, `suffix-most` with four times the match's length and
no floor. `sglang` is `stand.plugins.sglang.LookupCorpus` and `--size` the nodes per request; `--corpus module:Class`
puts another one in its place, such as sglang.srt.speculative.cpp_ngram.ngram_corpus:NgramCorpus.

Tokens per row-step count every step of every row but the first token, which the prompt gives. Times are CPU time of the
engine's calls in this thread; what a door does in threads of its own is not seen. With `--repeats` all is done so many
times, call by call the same, and each call's shortest time counts: other work on the machine makes calls longer, and
seldom the same ones twice. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import product
from types import SimpleNamespace
from typing import Protocol

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
from measuring.cpu_time import timed
from measuring.idle_options import refuse_idle
from measuring.interruption import run_and_report
from measuring.option_types import existing_file, positive_integer
from measuring.progress import Progress
from measuring.text_table import format_table
from replay_parts.drafters import suffix_decoding_cache
from replay_parts.selection import add_selection, selection_of
from workloads.recordings import Recording, read_recordings, read_tokenizer

from stand.plugins.vllm import LookupProposer

DOORS = ("vllm", "suffix", "suffix-most", "sglang")
OURS = "stand.plugins.sglang:LookupCorpus"
SUFFIX_DEPTH = 24  # vLLM's default


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
    us_per_row_median: float | None  # of steps with all rows, None where there was none
    slowest_step_us: float
    num_row_steps: int


@dataclass(slots=True)
class Replay:
    """What a door did with all streams."""

    num_row_steps: int
    num_tokens: int
    num_drafted: int
    microseconds: np.ndarray  # of each step
    is_full: np.ndarray  # bool: did the step have all rows?

    def shortest(self, other: Replay) -> Replay:
        """With the shorter time of each step. Raises ValueError where the other one did something else."""
        if self.num_row_steps != other.num_row_steps or len(self.microseconds) != len(other.microseconds):
            raise ValueError("repeats must make the same calls, got others; is the door deterministic?")
        return replace(self, microseconds=np.minimum(self.microseconds, other.microseconds))


@dataclass(slots=True)
class Stream:
    """A recording that is being decoded: `tokens[:end]` is committed, the last `num_new` of it since the last step."""

    name: int
    tokens: np.ndarray  # int32, the prompt first
    num_prompt: int
    end: int
    num_new: int = 1


@dataclass(slots=True)
class Outcome:
    """One step: tokens drafted and accepted per stream, and the CPU time of the engine's calls."""

    drafted: list[int]
    accepted: list[int]
    microseconds: float


class Door(Protocol):
    def step(self, live: Sequence[Stream]) -> Outcome: ...

    def drop(self, place: int, live: Sequence[Stream]) -> None:
        """The stream in this place ends; the last one will take its place."""


def common(guess: Sequence[int], truth: np.ndarray) -> int:
    """How many tokens two runs begin alike with."""
    num = 0
    while num < min(len(guess), len(truth)) and guess[num] == truth[num]:
        num += 1
    return num


def chain_outcome(chains: Sequence[Sequence[int]], live: Sequence[Stream], microseconds: float) -> Outcome:
    accepted = [
        common(chain, one.tokens[one.end : one.end + len(chain)]) for chain, one in zip(chains, live, strict=True)
    ]
    return Outcome([len(chain) for chain in chains], accepted, microseconds)


class VllmDoor:
    """`LookupProposer` with the arrays of vLLM's input batch: rows of ended requests are filled by the last one."""

    def __init__(self, num_tokens: int, *, num_rows: int, longest: int, options: dict):
        config = SimpleNamespace(
            additional_config={"stand": {"drafts": "all", **options}},  # no step is run that could be timed
            speculative_config=SimpleNamespace(num_speculative_tokens=num_tokens),
            model_config=SimpleNamespace(max_model_len=longest + num_tokens + 1, get_vocab_size=lambda: 2**31),
            scheduler_config=SimpleNamespace(max_num_seqs=num_rows),
        )
        self.proposer = LookupProposer(config)
        self.tokens = np.zeros((num_rows, longest), dtype=np.int32)
        self.lengths = np.zeros(num_rows, dtype=np.int32)

    def step(self, live: Sequence[Stream]) -> Outcome:
        sampled = []
        for row, one in enumerate(live):
            first = 0 if self.lengths[row] == 0 else one.end - one.num_new
            self.tokens[row, first : one.end] = one.tokens[first : one.end]
            self.lengths[row] = one.end
            sampled.append(one.tokens[one.end - one.num_new : one.end].tolist())
        took, chains = timed(self.proposer.propose, sampled, self.lengths, self.tokens, slot_mappings=None)
        return chain_outcome(chains, live, took)

    def drop(self, place: int, live: Sequence[Stream]) -> None:
        last = len(live) - 1
        self.tokens[place], self.lengths[place] = self.tokens[last], self.lengths[last]
        self.lengths[last] = 0


class SuffixDoor:
    """Arctic's suffix decoding as vLLM's `suffix` method calls it; `factor` 1 and `floor` 0.1 are vLLM's defaults."""

    def __init__(self, num_tokens: int, *, factor: float, floor: float):
        self.cache = suffix_decoding_cache()(max_tree_depth=SUFFIX_DEPTH, max_cached_requests=10_000)
        self.bounds = {"max_spec_tokens": num_tokens, "max_spec_factor": factor, "min_token_prob": floor}
        if factor > 1:
            self.bounds["max_spec_offset"] = float(num_tokens)
        self.known: set[int] = set()

    def step(self, live: Sequence[Stream]) -> Outcome:
        took, chains = timed(self._propose, live)
        return chain_outcome(chains, live, took)

    def _propose(self, live: Sequence[Stream]) -> list[list[int]]:
        chains = []
        for one in live:
            if one.name not in self.known:
                self.known.add(one.name)
                self.cache.start_request(one.name, np.ascontiguousarray(one.tokens[: one.num_prompt]))
            self.cache.add_active_response(one.name, one.tokens[one.end - one.num_new : one.end].tolist())
            pattern = np.ascontiguousarray(one.tokens[max(0, one.end - SUFFIX_DEPTH) : one.end])
            chains.append(list(self.cache.speculate(one.name, pattern, **self.bounds).token_ids))
        return chains

    def drop(self, place: int, live: Sequence[Stream]) -> None:
        self.cache.stop_request(live[place].name)


class CorpusDoor:
    """A class like SGLang's NgramCorpus, called as its NGRAM worker does: `module:Class`, `d` nodes per request."""

    def __init__(self, path: str, num_nodes: int, *, depth: int):
        module, name = path.split(":")
        corpus = getattr(importlib.import_module(module), name)
        self.num_nodes, self.depth = num_nodes, depth
        self.corpus = corpus(
            max_trie_depth=depth,
            min_bfs_breadth=1,
            max_bfs_breadth=10,
            draft_token_num=num_nodes,
            match_type="BFS",
            capacity=10_000_000,
        )

    def step(self, live: Sequence[Stream]) -> Outcome:
        names = [str(one.name) for one in live]
        tails = [one.tokens[max(0, one.end - self.depth) : one.end].tolist() for one in live]
        totals = [one.end for one in live]
        waited, _ = timed(self.corpus.synchronize)
        took, (token_ids, masks) = timed(self.corpus.batch_get, names, tails, totals)
        put, _ = timed(self.corpus.batch_put, tails)
        size = self.num_nodes
        token_ids, masks = token_ids.reshape(-1, size), masks.reshape(-1, size, size)
        earlier = np.tril(masks, -1) * (np.arange(size) + 1)
        parents = earlier.max(axis=2) - 1
        accepted = [path_length(*row, one) for *row, one in zip(token_ids, parents, live, strict=True)]
        return Outcome([size - 1] * len(live), accepted, waited + took + put)

    def drop(self, place: int, live: Sequence[Stream]) -> None:
        self.corpus.erase_match_state([str(live[place].name)])


def path_length(tokens: np.ndarray, parents: np.ndarray, one: Stream) -> int:
    """Tokens of the longest path from the root that come next in the stream."""
    node, num = 0, 0
    if tokens[0] != one.tokens[one.end - 1]:
        raise ValueError(f"a draft's root must be the last token {one.tokens[one.end - 1]}, got {tokens[0]}")
    while one.end + num < len(one.tokens):
        found = np.flatnonzero((parents == node) & (tokens == one.tokens[one.end + num]))
        if len(found) == 0:
            break
        node, num = found[0], num + 1
    return num


def replay(door: Door, recordings: list[Recording], *, num_rows: int) -> Replay:
    """Decode the recordings in order, `num_rows` at a time."""
    waiting = [
        Stream(number, np.concatenate([one.prompt, one.tokens]).astype(np.int32), len(one.prompt), len(one.prompt) + 1)
        for number, one in enumerate(recordings)
    ]
    waiting.reverse()
    live: list[Stream] = []
    num_row_steps = num_tokens = num_drafted = 0
    times, is_full = [], []
    while waiting or live:
        while waiting and len(live) < num_rows:
            live.append(waiting.pop())
        outcome = door.step(live)
        times.append(outcome.microseconds)
        is_full.append(len(live) == num_rows)
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
    return Replay(num_row_steps, num_tokens, num_drafted, np.array(times), np.array(is_full))


def make_door(name: str, size: int, options: argparse.Namespace, recordings: list[Recording]) -> Door:
    if name == "vllm":
        longest = max(len(one.prompt) + len(one.tokens) for one in recordings)
        return VllmDoor(size, num_rows=options.rows, longest=longest, options=options.options)
    if name == "sglang":
        depth = options.depth if options.depth is not None else 12 + size
        return CorpusDoor(options.corpus, size, depth=depth)
    most = name == "suffix-most"
    return SuffixDoor(size, factor=4.0 if most else 1.0, floor=0.0 if most else 0.1)


def run(options: argparse.Namespace) -> Iterator[Result]:
    """Every door and size on every file, as each is finished."""
    tokenizer = read_tokenizer(options.tokenizer)
    progress = Progress(len(options.files) * len(options.door) * len(options.size))
    for file in options.files:
        recordings = read_recordings(file, tokenizer, options.selection)
        for name, size in product(options.door, options.size):
            runs = (
                replay(make_door(name, size, options, recordings), recordings, num_rows=options.rows)
                for _ in range(options.repeats)
            )
            done = reduce(Replay.shortest, runs)
            shown = options.corpus if name == "sglang" and options.corpus != OURS else name
            result = result_of(done, file=file.name, door=shown, size=size, rows=options.rows)
            progress.add(1, f"{file.name} {shown} {size}: {result.tokens_per_row_step:.3f} tokens per row-step")
            yield result


def result_of(done: Replay, **named) -> Result:
    full = done.microseconds[done.is_full] / named["rows"]
    return Result(
        tokens_per_row_step=done.num_tokens / done.num_row_steps,
        drafted_per_row_step=done.num_drafted / done.num_row_steps,
        us_per_row_step=done.microseconds.sum() / done.num_row_steps,
        us_per_row_median=None if len(full) == 0 else float(np.median(full)),
        slowest_step_us=done.microseconds.max(),
        num_row_steps=done.num_row_steps,
        **named,
    )


def json_object(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return found


def class_name(text: str) -> str:
    if text.count(":") != 1 or text.startswith(":") or text.endswith(":"):
        raise argparse.ArgumentTypeError(f"must be module:Class, got {text!r}")
    return text


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="+", type=existing_file, metavar="FILE", help="recordings: .jsonl, also compressed"
    )
    parser.add_argument("--tokenizer", required=True, type=existing_file, help="tokenizer.json")
    parser.add_argument(
        "--door",
        nargs="+",
        choices=DOORS,
        default=["vllm"],
        help="the plug-ins that are replayed through (default: vllm)",
    )
    parser.add_argument(
        "--size", nargs="+", type=positive_integer, default=[8], help="tokens of a chain, or nodes per request (8)"
    )
    parser.add_argument("--rows", type=positive_integer, default=16, help="rows decoded side by side (%(default)s)")
    parser.add_argument(
        "--options", type=json_object, default={}, help="`vllm`: options as a JSON object (ServingOptions)"
    )
    parser.add_argument(
        "--corpus", type=class_name, default=OURS, help="`sglang`: the class, module:Class (%(default)s)"
    )
    parser.add_argument(
        "--depth", type=positive_integer, help="`sglang`: tokens shown of each text (default: 12 + nodes)"
    )
    parser.add_argument(
        "--repeats",
        type=positive_integer,
        default=1,
        help="runs alike, of which each call's shortest time counts (%(default)s)",
    )
    add_selection(parser)
    parsed = parser.parse_args(arguments)
    parsed.selection = selection_of(parser, parsed)
    refuse_idle(parser, parsed, "door", {"options": {"vllm"}, "corpus": {"sglang"}, "depth": {"sglang"}})
    return parsed


def main(arguments: list[str] | None = None) -> int:
    return run_and_report("replay_serving", run(parse(arguments)), report)


def report(results: list[Result]) -> None:
    header = ["file", "door", "size", "rows", "tokens/row-step", "drafted", "us/row-step", "median", "slowest step us"]
    rows = [
        [r.file, r.door, r.size, r.rows, f"{r.tokens_per_row_step:.3f}", r.drafted_per_row_step, r.us_per_row_step]
        + [r.us_per_row_median, r.slowest_step_us]
        for r in results
    ]
    print(format_table(header, rows))
    print(json.dumps({"results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    sys.exit(main())
