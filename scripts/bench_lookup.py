"""What the blended lookup tree costs: drafting, learning, memory; beside Arctic's suffix decoding where installed.

    taskset -c 1 python scripts/bench_lookup.py FILE... --tokenizer tokenizer.json --contexts 1000000 10000000 --arctic

FILE is a recording as for `replay.py`. The tree learns recordings until it holds `--contexts` contexts (beginning
again with other ids where they are not enough), then the last ones are decoded as in a replay, in groups; every step
drafts with each budget, in turn, and follows the largest. Sixteen others are decoded side by side. Arctic gets the same
recordings as the smallest tree. Times are CPU time of calls from Python, in microseconds, without what reading the
clock takes. What else runs on the machine can only make them longer, so the group with the lowest median counts, with
its own 99th percentile; those over all groups stand in the JSON document, which is the last line of stdout.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
from cpu_time import timed
from recordings import Recording, Selection, read_recordings
from replay import walk
from replay_drafters import SCOPES, ArcticReplay, BlendedReplay, ReplayDrafter, grown_guess
from text_table import format_table
from tokenizers import Tokenizer

from stand.trees import BlendedLookup

BUDGETS = (8, 32, 80)
ROWS, NODES_PER_ROW = 16, 8
CHUNK = 8  # tokens per call while the tree is filled
GROUP_SIZE = 3  # recordings
LARGEST_ID = 2**20
SMALL_CAP, MANY_EVICTED = 16 << 20, 500_000


def summary(groups: list[list[float]]) -> dict[str, float]:
    best, every = min(groups, key=np.median), np.concatenate(groups)
    return {
        "median": float(np.median(best)),
        "p99": float(np.percentile(best, 99)),
        "median_all": float(np.median(every)),
        "p99_all": float(np.percentile(every, 99)),
    }


def endless(recordings: list[Recording]) -> Iterator[Recording]:
    """The recordings again and again, with other ids each time."""
    for lap in count():
        for one in recordings:
            prompt, tokens = ((ids + 7919 * lap) % LARGEST_ID if lap else ids for ids in (one.prompt, one.tokens))
            yield Recording(one.problem, one.sample, prompt.astype(np.int32), tokens.astype(np.int32))


def fill(drafter: ReplayDrafter, recordings: Iterator[Recording], is_full: Callable[[int], bool]) -> dict:
    """Learn whole recordings until enough; what that took by the call and by the token."""
    micros: list[float] = []
    num_tokens = 0
    while not is_full(num_tokens):
        one = next(recordings)
        stream = np.concatenate([one.prompt, one.tokens])
        drafter.start(one.problem, one.prompt)
        for end in range(CHUNK, len(stream), CHUNK):
            micros.append(timed(drafter.learn, stream[:end], CHUNK)[0])
        drafter.finish()
        num_tokens += len(stream)
    return {
        "tokens": num_tokens,
        "learn_us_per_token": float(np.median(micros) / CHUNK),
        "learn_us_worst_call": float(max(micros)),
        "learn_us_p9999_call": float(np.percentile(micros, 99.99)),
    }


def decode(drafter: ReplayDrafter, recordings: list[Recording], micros: dict[int, list[float]]) -> None:
    """A replay that drafts with every budget at every step."""
    turn = 0
    for one in recordings:
        stream = np.concatenate([one.prompt, one.tokens]).astype(np.int32)
        end = len(one.prompt) + 1
        drafter.start(one.problem, one.prompt)
        drafter.learn(stream[:end], end)
        while end < len(stream):
            turn += 1
            for budget in (*BUDGETS[turn % 3 :], *BUDGETS[: turn % 3]):
                took, draft = timed(drafter.draft, stream[:end], budget)
                micros[budget].append(took)
                if budget == max(BUDGETS):
                    num_accepted = len(walk(drafter.guess(draft), stream[end:]))
            num_new = min(num_accepted + 1, len(stream) - end)
            end += num_new
            drafter.learn(stream[:end], num_new)
        drafter.finish()


def bench_drafts(drafter: ReplayDrafter, recordings: list[Recording]) -> dict[str, dict[str, float]]:
    groups = []
    for first in range(0, len(recordings), GROUP_SIZE):
        groups.append({budget: [] for budget in BUDGETS})
        decode(drafter, recordings[first : first + GROUP_SIZE], groups[-1])
    return {f"draft_{budget}": summary([group[budget] for group in groups]) for budget in BUDGETS}


def bench_rows(lookup: BlendedLookup, recordings: list[Recording]) -> dict[str, float]:
    """Sixteen recordings decoded side by side: one call per step, eight nodes per row."""
    streams = [np.concatenate([one.prompt, one.tokens]).astype(np.int32) for one in recordings[:ROWS]]
    ends = [len(one.prompt) + 1 for one in recordings[:ROWS]]
    keys, scopes = np.arange(ROWS), [one.problem % SCOPES for one in recordings[:ROWS]]
    budget = ROWS * NODES_PER_ROW
    for stream, end, scope in zip(streams, ends, scopes, strict=True):
        lookup.learn(stream[:0], stream[:end], scope=scope)
    micros: list[float] = []
    while all(end + ROWS * NODES_PER_ROW < len(stream) for stream, end in zip(streams, ends, strict=True)):
        histories = [stream[:end] for stream, end in zip(streams, ends, strict=True)]
        took, batch = timed(lookup.draft, histories, budget, seed=0, rows=keys, steps=keys, scopes=scopes)
        micros.append(took)
        runs = []
        for row, (stream, end) in enumerate(zip(streams, ends, strict=True)):
            runs.append(stream[end : end + len(walk(grown_guess(batch[row]), stream[end:])) + 1])
        lookup.judge(histories, runs, scopes=scopes)
        for row, (history, run) in enumerate(zip(histories, runs, strict=True)):
            lookup.learn(history, run, scope=scopes[row])
            ends[row] += len(run)
    return summary([list(part) for part in np.array_split(micros, 5)])


def bench_laws(lookup: BlendedLookup, recordings: list[Recording]) -> dict[str, float]:
    """`learn_batch` with ten entries per scored node, by the node and context length."""
    rng = np.random.default_rng(0)
    groups = []
    for one in recordings[: 5 * GROUP_SIZE]:
        groups.append([])
        for end in np.linspace(30, len(one.tokens) - 1, 40).astype(int):
            scopes = [one.problem % SCOPES]
            batch = lookup.draft([one.tokens[:end]], 80, seed=0, rows=[0], steps=[0], scopes=scopes)
            ids = np.argsort(rng.random((batch.num_nodes, 64)))[:, :10].astype(np.int32) + 100
            ids[:, 0] = one.tokens[end]
            probs = np.sort(rng.dirichlet(np.full(10, 0.3), batch.num_nodes).astype(np.float32))[:, ::-1].copy()
            took, _ = timed(lookup.learn_batch, batch, [one.tokens[: end - 1]], ids, probs, scopes=scopes)
            groups[-1].append(took / batch.num_nodes / lookup.depth)
    return summary(groups)


def bench_lookup(
    known: list[Recording], fresh: list[Recording], crowd: list[Recording], num_contexts: int, max_bytes: int
) -> dict:
    drafter = BlendedReplay(max_bytes=max_bytes)
    lookup = drafter.lookup
    figures = fill(drafter, endless(known), lambda _: len(lookup) >= num_contexts or lookup.num_evicted > 0)
    figures |= {
        "contexts": len(lookup),
        "evicted": lookup.num_evicted,
        "bytes_per_token": lookup.nbytes / figures["tokens"],
        "megabytes": lookup.nbytes / 2**20,
    }
    figures |= bench_drafts(drafter, fresh)
    figures["draft_16_rows"] = bench_rows(lookup, crowd)
    figures["laws_per_node_and_order"] = bench_laws(lookup, fresh)
    return figures


def bench_eviction(known: list[Recording]) -> dict:
    """Learning when every new context takes another one's place."""
    drafter = BlendedReplay(max_bytes=SMALL_CAP)
    figures = fill(drafter, endless(known), lambda _: drafter.lookup.num_evicted >= MANY_EVICTED)
    return figures | {"evicted": drafter.lookup.num_evicted, "megabytes": drafter.nbytes / 2**20}


def bench_arctic(known: list[Recording], fresh: list[Recording], num_tokens: int) -> dict:
    """Arctic's tree mode over the same recordings; every recording is one request."""
    drafter = ArcticReplay()
    figures = fill(drafter, endless(known), lambda learned: learned >= num_tokens)
    return figures | bench_drafts(drafter, fresh)


def table(figures: dict) -> str:
    header = ["", "contexts or tokens", *(f"draft {b}: median, p99" for b in BUDGETS), "16 rows x 8", "learn/token"]
    header += ["worst call", "laws/node, order", "B/token"]
    rows = []
    for name, one in figures.items():
        drafts = [one.get(f"draft_{budget}") for budget in BUDGETS]
        drafts = [draft and f"{draft['median']:.1f}, {draft['p99']:.1f}" for draft in drafts]
        row = [name, one.get("contexts", one["tokens"]), *drafts]
        row += [one["draft_16_rows"]["median"] if "draft_16_rows" in one else None, one["learn_us_per_token"]]
        laws = one.get("laws_per_node_and_order")
        rows.append([*row, one.get("learn_us_worst_call"), laws and laws["median"], one.get("bytes_per_token")])
    return format_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--tokenizer", required=True, type=Path, help="tokenizer.json")
    parser.add_argument("--contexts", nargs="+", type=int, default=[1_000_000], help="sizes of the tree")
    parser.add_argument("--max-tokens", type=int, default=16_000, help="cut samples to so many tokens")
    parser.add_argument("--samples", type=int, help="at most so many samples per problem")
    parser.add_argument("--groups", type=int, default=5, help="of three recordings each, to decode")
    parser.add_argument("--max-bytes", type=int, default=2 << 30, help="memory cap of the tree")
    parser.add_argument("--arctic", action="store_true", help="Arctic's tree mode too (arctic-inference)")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    selection = Selection(samples=options.samples, max_tokens=options.max_tokens)
    recordings = [one for file in options.files for one in read_recordings(file, tokenizer, selection)]
    num_fresh = options.groups * GROUP_SIZE
    if len(recordings) <= num_fresh + ROWS:
        parser.error(f"the files must hold more than {num_fresh + ROWS} recordings, got {len(recordings)}")
    known, rest = recordings[: -num_fresh - ROWS], recordings[-num_fresh - ROWS :]
    crowd, fresh = rest[:ROWS], rest[ROWS:]
    figures = {}
    for size in options.contexts:
        figures[f"lookup, {size:,}"] = bench_lookup(known, fresh, crowd, size, options.max_bytes)
    figures["lookup, 16 MB"] = bench_eviction(known)
    if options.arctic:
        figures["arctic"] = bench_arctic(known, fresh, next(iter(figures.values()))["tokens"])
    print(table(figures))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
