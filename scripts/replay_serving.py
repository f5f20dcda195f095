"""Replay recorded streams through the doors of serving engines, many rows at once, without a model.

    python scripts/replay_serving.py FILE... --tokenizer tokenizer.json --door vllm suffix suffix-most --size 4 8 16
    python scripts/replay_serving.py FILE... --tokenizer tokenizer.json --door sglang --size 8 12 32 --rows 4

Recordings are decoded in order, `--rows` at a time; a row that ends makes room for the next recording, and nothing is
forgotten between problems. `vllm` is `stand.plugins.vllm.LookupProposer` and `--size` its chains' tokens; `suffix` is
Arctic's suffix decoding (arctic-inference) with vLLM's settings, `suffix-most` with four times the match's length and
no floor. `sglang` is `stand.plugins.sglang.LookupCorpus` and `--size` the nodes per request; `--corpus module:Class`
puts another one in its place, such as sglang.srt.speculative.cpp_ngram.ngram_corpus:NgramCorpus.

With `--servers` the recordings are dealt to so many servers, which make their steps in turn, and with `--share` these
tell each other what they learn through a folder (`stand.sharing`).

Tokens per row-step count every step of every row but the first token, which the prompt gives. Times are CPU time of the
engine's calls in this thread; what a door does in threads of its own is not seen. With `--repeats` all is done so many
times, call by call the same, and each call's shortest time counts: other work on the machine makes calls longer, and
seldom the same ones twice. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import product

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
from measuring.idle_options import refuse_idle
from measuring.interruption import run_and_report
from measuring.option_types import existing_file, positive_integer
from measuring.progress import Progress
from measuring.text_table import format_table
from replay_parts.doors import CorpusDoor, Door, Stream, SuffixDoor, VllmDoor
from replay_parts.selection import add_selection, selection_of
from workloads.recordings import Recording, read_recordings, read_tokenizer

DOORS = ("vllm", "suffix", "suffix-most", "sglang")
OURS = "stand.plugins.sglang:LookupCorpus"


@dataclass(frozen=True, slots=True)
class Result:
    """One door on one file."""

    file: str
    door: str
    size: int
    rows: int
    servers: int
    is_shared: bool
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


def stream_of(name: int, recording: Recording) -> Stream:
    num_prompt = len(recording.prompt)
    tokens = np.concatenate([recording.prompt, recording.tokens]).astype(np.int32)
    return Stream(name, tokens, num_prompt, num_prompt + 1)


class Server:
    """A door and its recordings, decoded in order, `num_rows` at a time."""

    def __init__(self, door: Door, recordings: Sequence[Recording], *, num_rows: int):
        self._door, self._num_rows = door, num_rows
        self._waiting = [stream_of(number, one) for number, one in enumerate(recordings)][::-1]
        self._live: list[Stream] = []
        self.done = Replay(0, 0, 0, np.empty(0), np.empty(0, dtype=bool))
        self._times: list[float] = []
        self._is_full: list[bool] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._live)

    def step(self) -> None:
        live = self._live
        while self._waiting and len(live) < self._num_rows:
            live.append(self._waiting.pop())
        outcome = self._door.step(live)
        self._times.append(outcome.microseconds)
        self._is_full.append(len(live) == self._num_rows)
        self.done.num_row_steps += len(live)
        self.done.num_drafted += sum(outcome.drafted)
        for one, accepted in zip(live, outcome.accepted, strict=True):
            one.num_new = min(accepted + 1, len(one.tokens) - one.end)
            one.end += one.num_new
            self.done.num_tokens += one.num_new
        for place in range(len(live) - 1, -1, -1):
            if live[place].end == len(live[place].tokens):
                self._door.drop(place, live)
                last = live.pop()
                if place < len(live):
                    live[place] = last

    def result(self) -> Replay:
        return replace(self.done, microseconds=np.array(self._times), is_full=np.array(self._is_full))


def replay(doors: Sequence[Door], recordings: list[Recording], *, num_rows: int) -> Replay:
    """Decode the recordings by one server per door, which make their steps in turn; each has every n-th recording."""
    servers = [Server(door, recordings[number :: len(doors)], num_rows=num_rows) for number, door in enumerate(doors)]
    while busy := [server for server in servers if server.is_busy]:
        for server in busy:
            server.step()
    done = [server.result() for server in servers]
    return Replay(
        num_row_steps=sum(one.num_row_steps for one in done),
        num_tokens=sum(one.num_tokens for one in done),
        num_drafted=sum(one.num_drafted for one in done),
        microseconds=np.concatenate([one.microseconds for one in done]),
        is_full=np.concatenate([one.is_full for one in done]),
    )


def make_door(
    name: str, size: int, options: argparse.Namespace, recordings: list[Recording], shared: dict[str, str]
) -> Door:
    if name == "vllm":
        longest = max(len(one.prompt) + len(one.tokens) for one in recordings)
        return VllmDoor(size, num_rows=options.rows, longest=longest, options=options.options | shared)
    if name == "sglang":
        depth = options.depth if options.depth is not None else 12 + size
        return CorpusDoor(options.corpus, size, depth=depth)
    most = name == "suffix-most"
    return SuffixDoor(size, factor=4.0 if most else 1.0, floor=0.0 if most else 0.1)


def one_run(name: str, size: int, options: argparse.Namespace, recordings: list[Recording]) -> Replay:
    with tempfile.TemporaryDirectory() as folder:
        shared = {"share": folder} if options.share else {}
        doors = [make_door(name, size, options, recordings, shared) for _ in range(options.servers)]
        return replay(doors, recordings, num_rows=options.rows)


def run(options: argparse.Namespace) -> Iterator[Result]:
    """Every door and size on every file, as each is finished."""
    tokenizer = read_tokenizer(options.tokenizer)
    progress = Progress(len(options.files) * len(options.door) * len(options.size))
    for file in options.files:
        recordings = read_recordings(file, tokenizer, options.selection)
        for name, size in product(options.door, options.size):
            done = reduce(Replay.shortest, (one_run(name, size, options, recordings) for _ in range(options.repeats)))
            shown = options.corpus if name == "sglang" and options.corpus != OURS else name
            result = result_of(
                done,
                file=file.name,
                door=shown,
                size=size,
                rows=options.rows,
                servers=options.servers,
                is_shared=options.share,
            )
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
    parser.add_argument(
        "--servers",
        type=positive_integer,
        default=1,
        help="servers that the recordings are dealt to, each with so many rows and a lookup of its own (%(default)s)",
    )
    parser.add_argument(
        "--share", action="store_true", help="`vllm`: servers tell each other what they learn (default: they do not)"
    )
    add_selection(parser)
    parsed = parser.parse_args(arguments)
    if parsed.share:
        _check_sharing(parser, parsed)
    parsed.selection = selection_of(parser, parsed)
    refuse_idle(parser, parsed, "door", {"options": {"vllm"}, "corpus": {"sglang"}, "depth": {"sglang"}})
    return parsed


def _check_sharing(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    if parsed.servers == 1:
        parser.error("--share has no effect with one server; give --servers 2 or more")
    if parsed.door != ["vllm"]:
        parser.error(f"--share is for --door vllm alone, got {' '.join(parsed.door)}; replay the others by themselves")
    if parsed.repeats > 1:
        parser.error("--repeats must make the same calls, which servers that share do not; leave one of both out")


def main(arguments: list[str] | None = None) -> int:
    return run_and_report("replay_serving", run(parse(arguments)), report)


def report(results: list[Result]) -> None:
    header = ["file", "door", "size", "rows", "servers", "tokens/row-step", "drafted"]
    header += ["us/row-step", "median", "slowest step us"]
    rows = [
        [r.file, r.door, r.size, r.rows, f"{r.servers}, sharing" if r.is_shared else r.servers]
        + [f"{r.tokens_per_row_step:.3f}", r.drafted_per_row_step, r.us_per_row_step]
        + [r.us_per_row_median, r.slowest_step_us]
        for r in results
    ]
    print(format_table(header, rows))
    print(json.dumps({"results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    sys.exit(main())
