"""What the blended lookup costs: drafting, learning, memory; beside Arctic's suffix decoding where installed.

    taskset -c 1 python scripts/bench_lookup.py FILE... --tokenizer tokenizer.json --contexts 1000000 10000000 --arctic

FILE is a recording as for `replay.py`. The lookup learns recordings until it holds `--contexts` contexts (beginning
again with other ids where they are not enough), then the last ones are decoded as in a replay, in groups; every step
drafts with each budget, in turn, and follows the largest. Sixteen others are decoded side by side. Arctic gets the same
recordings as the smallest lookup. Times are CPU time of calls from Python, in microseconds, without what reading the
clock takes. What else runs on the machine can only make them longer, so the group with the lowest median counts, with
its own 99th percentile; those over all groups stand in the JSON document, which is the last line of stdout. With
`--repeats` all of it is done so many times, from an empty lookup, call by call the same, and each call's shortest time
counts: what interrupted it once does not interrupt the same call again, while what a call has to do stays in.

Columns, in microseconds where nothing is said: a draft by its budget; one call for 16 rows of 8 nodes; learning a
token, and the longest call of those that learn; learning a node's law in a context of one length; bytes of the lookup
per token that it learned. The row `lookup, 16 MB` learns only: a lookup of so much memory, when every new context takes
another one's place.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from itertools import count

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
from measuring.cpu_time import timed
from measuring.option_types import existing_file, positive_integer
from measuring.progress import say
from measuring.text_table import format_table
from replay_parts.drafters import (
    SCOPES,
    ArcticReplay,
    BlendedReplay,
    ReplayDrafter,
    accepted_path,
)
from replay_parts.side_by_side import SideBySide
from workloads.recordings import Recording, Selection, read_recordings, read_tokenizer

from stand.trees import BlendedLookup
from stand.trees.kinds import KINDS

BUDGETS = (8, 32, 80)
ROWS, NODES_PER_ROW = 16, 8
CHUNK = 8  # tokens per call while the lookup is filled
LEAST_TOKENS = ROWS * NODES_PER_ROW + 1  # a row that one step could take to its end is not decoded
ROW_GROUPS = 5  # of steps
GROUP_SIZE = 3  # recordings
LARGEST_ID = 2**20
SMALL_CAP, MANY_EVICTED = 16 << 20, 500_000

Times = dict[str, list[list[float]]]  # what was timed -> groups of calls, in microseconds
Facts = dict[str, float]


def summary(groups: list[list[float]]) -> dict[str, float]:
    best, every = min(groups, key=np.median), np.concatenate(groups)
    return {
        "median": float(np.median(best)),
        "p99": float(np.percentile(best, 99)),
        "median_all": float(np.median(every)),
        "p99_all": float(np.percentile(every, 99)),
    }


def summaries(times: Times, facts: Facts) -> dict:
    learning = times["learn"][0]
    figures = facts | {
        "learn_us_per_token": float(np.median(learning) / CHUNK),
        "learn_us_worst_call": float(max(learning)),
        "learn_us_p9999_call": float(np.percentile(learning, 99.99)),
    }
    return figures | {name: summary(groups) for name, groups in times.items() if name != "learn"}


def shortest(runs: list[Times]) -> Times:
    """Of runs that made the same calls: each call's shortest time."""
    return {
        name: [np.minimum.reduce([np.array(one[name][place]) for one in runs]).tolist() for place in range(len(groups))]
        for name, groups in runs[0].items()
    }


def repeated(bench: Callable[..., tuple[Times, Facts]], repeats: int, *arguments) -> dict:
    runs = [bench(*arguments) for _ in range(repeats)]
    return summaries(shortest([times for times, _ in runs]), runs[0][1])


def endless(recordings: list[Recording]) -> Iterator[Recording]:
    """The recordings again and again, with other ids each time."""
    for lap in count():
        for one in recordings:
            prompt, tokens = ((ids + 7919 * lap) % LARGEST_ID if lap else ids for ids in (one.prompt, one.tokens))
            yield Recording(one.problem, one.sample, prompt.astype(np.int32), tokens.astype(np.int32))


def fill(
    drafter: ReplayDrafter, recordings: Iterator[Recording], is_full: Callable[[int], bool]
) -> tuple[list[float], int]:
    """Learn whole recordings until enough: (microseconds of each call, tokens)."""
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
    return micros, num_tokens


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
                    num_accepted = len(accepted_path(drafter.guess(draft), stream[end:]))
            num_new = min(num_accepted + 1, len(stream) - end)
            end += num_new
            drafter.learn(stream[:end], num_new)
        drafter.finish()


def bench_drafts(drafter: ReplayDrafter, recordings: list[Recording]) -> Times:
    groups = []
    for first in range(0, len(recordings), GROUP_SIZE):
        groups.append({budget: [] for budget in BUDGETS})
        decode(drafter, recordings[first : first + GROUP_SIZE], groups[-1])
    return {f"draft_{budget}": [group[budget] for group in groups] for budget in BUDGETS}


def bench_rows(lookup: BlendedLookup, recordings: list[Recording], kind: str) -> list[list[float]]:
    """Sixteen recordings decoded side by side: one call per step, eight nodes per row."""
    scopes = [one.problem % SCOPES for one in recordings]
    for one, scope in zip(recordings, scopes, strict=True):
        known = np.concatenate([one.prompt, one.tokens[:1]]).astype(np.int32)
        lookup.learn(known[:0], known, scope=scope)
    rows, budget = SideBySide(lookup, recordings, kind=kind, scopes=scopes), ROWS * NODES_PER_ROW
    micros: list[float] = []
    while rows.least_left > budget:
        took, batch = timed(lookup.draft, **rows.request(budget=budget))
        micros.append(took)
        rows.follow(batch)
    return [part.tolist() for part in np.array_split(micros, min(ROW_GROUPS, len(micros)))]


def bench_laws(lookup: BlendedLookup, recordings: list[Recording]) -> list[list[float]]:
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
    return groups


def bench_lookup(
    known: list[Recording],
    fresh: list[Recording],
    crowd: list[Recording],
    num_contexts: int,
    max_bytes: int,
    kind: str,
) -> tuple[Times, Facts]:
    drafter = BlendedReplay(kind=kind, max_bytes=max_bytes)
    lookup = drafter.lookup
    learning, num_tokens = fill(
        drafter, endless(known), lambda _: len(lookup) >= num_contexts or lookup.num_evicted > 0
    )
    facts = {
        "tokens": num_tokens,
        "contexts": len(lookup),
        "evicted": lookup.num_evicted,
        "bytes_per_token": lookup.nbytes / num_tokens,
        "megabytes": lookup.nbytes / 2**20,
    }
    times = {"learn": [learning]} | bench_drafts(drafter, fresh)
    times["draft_16_rows"] = bench_rows(lookup, crowd, kind)
    times["laws_per_node_and_order"] = bench_laws(lookup, fresh)
    return times, facts


def bench_eviction(known: list[Recording]) -> tuple[Times, Facts]:
    """Learning when every new context takes another one's place."""
    drafter = BlendedReplay(max_bytes=SMALL_CAP)
    learning, num_tokens = fill(drafter, endless(known), lambda _: drafter.lookup.num_evicted >= MANY_EVICTED)
    facts = {"tokens": num_tokens, "evicted": drafter.lookup.num_evicted, "megabytes": drafter.nbytes / 2**20}
    return {"learn": [learning]}, facts


def bench_arctic(known: list[Recording], fresh: list[Recording], enough: int) -> tuple[Times, Facts]:
    """Arctic's tree mode over the same recordings; every recording is one request."""
    drafter = ArcticReplay()
    learning, num_tokens = fill(drafter, endless(known), lambda learned: learned >= enough)
    return {"learn": [learning]} | bench_drafts(drafter, fresh), {"tokens": num_tokens}


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


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=existing_file, metavar="FILE", help="recordings, as for replay.py")
    parser.add_argument("--tokenizer", required=True, type=existing_file, help="tokenizer.json")
    parser.add_argument(
        "--contexts", nargs="+", type=positive_integer, default=[1_000_000], help="sizes of the lookup (1000000)"
    )
    parser.add_argument(
        "--max-tokens", type=positive_integer, default=16_000, help="cut samples to so many tokens (%(default)s)"
    )
    parser.add_argument("--samples", type=positive_integer, help="at most so many samples per problem")
    parser.add_argument(
        "--groups", type=positive_integer, default=5, help="of three recordings each, to decode (%(default)s)"
    )
    parser.add_argument(
        "--max-bytes", type=positive_integer, default=2 << 30, help="memory cap of the lookup (default: 2 GB)"
    )
    parser.add_argument("--kind", choices=KINDS, default="deterministic", help="of drafts that are grown (%(default)s)")
    parser.add_argument(
        "--repeats",
        type=positive_integer,
        default=1,
        help="runs alike, of which each call's shortest time counts (%(default)s)",
    )
    parser.add_argument("--arctic", action="store_true", help="Arctic's tree mode too (arctic-inference)")
    return parser.parse_args()


def run(options: argparse.Namespace) -> dict[str, dict]:
    """Figures by what was filled. Raises ValueError, OSError and ImportError before anything is timed."""
    if options.arctic:
        ArcticReplay()  # is it installed?
    tokenizer = read_tokenizer(options.tokenizer)
    selection = Selection(samples=options.samples, max_tokens=options.max_tokens)
    recordings = [one for file in options.files for one in read_recordings(file, tokenizer, selection)]
    num_fresh = options.groups * GROUP_SIZE
    if len(recordings) <= num_fresh + ROWS:
        raise ValueError(f"the files must hold more than {num_fresh + ROWS} recordings, got {len(recordings)}")
    known, rest = recordings[: -num_fresh - ROWS], recordings[-num_fresh - ROWS :]
    crowd, fresh = rest[:ROWS], rest[ROWS:]
    if (shortest := min(len(one.tokens) for one in crowd)) <= LEAST_TOKENS:
        raise ValueError(
            f"the {ROWS} recordings before the last {num_fresh} must be longer than {LEAST_TOKENS} tokens, got one of "
            f"{shortest}; leave it out or raise --max-tokens"
        )
    figures = {}
    for size in options.contexts:
        arguments = known, fresh, crowd, size, options.max_bytes, options.kind
        figures[f"lookup, {size:,}"] = repeated(bench_lookup, options.repeats, *arguments)
    figures["lookup, 16 MB"] = repeated(bench_eviction, options.repeats, known)
    if options.arctic:
        num_tokens = next(iter(figures.values()))["tokens"]
        figures["arctic"] = repeated(bench_arctic, options.repeats, known, fresh, num_tokens)
    return figures


def main() -> int:
    try:
        figures = run(read_arguments())
    except (ValueError, OSError, ImportError) as error:
        say(f"bench_lookup: {error}")
        return 2
    print(table(figures))
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
