"""What a layer's attention costs on a CPU in a step with drafts, by who computes it.

    python scripts/bench_tree_attention.py                               # SmolLM2's heads
    python scripts/bench_tree_attention.py --heads 32 --key-heads 8 --size 128 --lengths 500,4000 --threads 1

Rows have `length` committed keys and a random tree of `nodes` tokens, the pending one too. `torch`: padded rows, a mask
and `scaled_dot_product_attention`. `ours`: `stand.forward.few_tokens.attention`. Keys change from call to call, as they
do from layer to layer, and the ways take turns; results are compared first. Microseconds are the least over rounds.
Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
import torch
from measuring.option_types import count_list, positive_integer
from measuring.text_table import format_table

from stand.forward.packed_plan import StepPlan
from stand.forward.tree_attention import attend
from stand.trees import DraftBatch, DraftTree

MOST_LAYERS = 30
MEGABYTES = 64  # of different keys in a round: more than caches hold
HEADER = ("rows", "nodes", "length", "threads", "torch us", "ours us", "torch / ours")


def random_tree(generator: np.random.Generator, num_nodes: int) -> DraftTree:
    parents = np.array([-1, *(generator.integers(0, node) for node in range(1, num_nodes))], dtype=np.int32)
    none = np.zeros((num_nodes, 1), dtype=np.int32)
    return DraftTree(token_ids=none[:, 0], parents=parents, support_ids=none, law=none.astype(np.float32))


def plans(num_rows: int, num_nodes: int, length: int) -> dict[str, StepPlan]:
    generator = np.random.default_rng(0)
    batch = DraftBatch.concatenate([random_tree(generator, num_nodes) for _ in range(num_rows)])
    made = {way: StepPlan.for_drafts(batch, np.full(num_rows, length)) for way in ("torch", "ours")}
    made["torch"].has_few_tokens, made["ours"].has_few_tokens = False, True
    return made


def measure(num_rows: int, num_nodes: int, length: int, threads: int, options: argparse.Namespace) -> dict:
    """Seconds of one call by each way."""
    torch.set_num_threads(threads)
    made = plans(num_rows, num_nodes, length)
    shape = (num_rows, options.key_heads, length + num_nodes, options.size)
    num_layers = max(2, min(MOST_LAYERS, round(options.megabytes * 1e6 / (8 * np.prod(shape)))))
    layers = [(torch.randn(shape), torch.randn(shape)) for _ in range(num_layers)]
    query = torch.randn(1, num_rows * num_nodes, options.heads, options.size).transpose(1, 2)
    torch.testing.assert_close(
        *(attend(torch.nn.Module(), query, *layers[0], None, stand_plan=plan)[0] for plan in made.values())
    )
    least = dict.fromkeys(made, float("inf"))
    for _ in range(options.rounds):
        for way, plan in made.items():
            begin = time.perf_counter()
            for keys, values in layers:
                attend(torch.nn.Module(), query, keys, values, None, stand_plan=plan)
            least[way] = min(least[way], (time.perf_counter() - begin) / num_layers)
    return {"rows": num_rows, "nodes": num_nodes, "length": length, "threads": threads, **least}


def table_row(found: dict) -> tuple:
    microseconds = [f"{1e6 * found[way]:.0f}" for way in ("torch", "ours")]
    sizes = (found[name] for name in ("rows", "nodes", "length", "threads"))
    return (*sizes, *microseconds, f"{found['torch'] / found['ours']:.2f}")


def read_options(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=positive_integer, default=9, help="of queries; default: SmolLM2's 9")
    parser.add_argument("--key-heads", type=positive_integer, default=3, help="of keys and values (%(default)s)")
    parser.add_argument("--size", type=positive_integer, default=64, help="of a head (%(default)s)")
    parser.add_argument("--rows", type=count_list, default=[1, 4], help="rows decoded together (default: 1,4)")
    parser.add_argument(
        "--nodes", type=count_list, default=[1, 3, 8, 32], help="of a row, its pending token included (1 3 8 32)"
    )
    parser.add_argument(
        "--lengths", type=count_list, default=[300, 4000], help="committed keys of a row (default: 300,4000)"
    )
    parser.add_argument(
        "--threads", type=count_list, default=[torch.get_num_threads()], help="CPU threads (default: torch's)"
    )
    parser.add_argument(
        "--rounds", type=positive_integer, default=10, help="of both ways in turn; the least time counts (%(default)s)"
    )
    parser.add_argument(
        "--megabytes", type=positive_integer, default=MEGABYTES, help="of keys and values in a round (%(default)s)"
    )
    options = parser.parse_args(command_line)
    if options.heads % options.key_heads:
        parser.error(f"--heads must be a multiple of --key-heads, got {options.heads} and {options.key_heads}")
    return options


@torch.inference_mode()
def main(command_line: Sequence[str] | None = None) -> None:
    options = read_options(command_line)
    found = [
        measure(rows, nodes, length, threads, options)
        for threads in options.threads
        for rows in options.rows
        for nodes in options.nodes
        for length in options.lengths
    ]
    print(format_table(HEADER, [table_row(each) for each in found]), end="\n\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
