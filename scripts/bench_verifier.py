"""What verification costs, compared with the target's softmax.

Usage: python scripts/bench_verifier.py [--rows 16] [--nodes 80] [--vocabulary 152064] [--repeats 5] [--device cpu]

Random drafts on the 80-node shape (its first `--nodes` slots), random target laws. `thresholds` is the deterministic
part (an [M, S] gather and small array work), `verify` adds the walk and the final draw (rows x vocabulary numbers),
`log_softmax` is one pass over the logits of all M nodes, which the engine needs in any case. Medians of process CPU
seconds on a CPU, of wall seconds elsewhere. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
import torch
from measuring.option_types import device_name, positive_integer
from measuring.progress import say
from workloads.random_draft import SUPPORT_SIZE, random_draft

from stand.trees import DraftBatch, TreeShape
from stand.verifiers import TargetRows, VerifierNoise, get_verifier

MOST_NODES = TreeShape.paper().num_nodes
TIMED_RULES = ("match", "coupled", "rrs", "traversal")


def median_seconds(work: Callable[[], object], *, repeats: int, device: torch.device) -> float:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds = []
    for _ in range(repeats):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        start = clock()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(clock() - start)
    return statistics.median(seconds[1:] or seconds)


def target_laws(num_nodes: int, options: argparse.Namespace, *, device: torch.device) -> tuple[torch.Tensor, float]:
    """(random laws [M, V], seconds that log_softmax of as many logits takes)."""
    logits = torch.randn((num_nodes, options.vocabulary), generator=torch.Generator().manual_seed(0)).to(device)
    seconds = median_seconds(lambda: torch.log_softmax(logits, dim=1), repeats=options.repeats, device=device)
    return torch.softmax(logits * 2, dim=1), seconds


def arguments(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=positive_integer, default=16, help="drafts verified together (%(default)s)")
    parser.add_argument("--nodes", type=positive_integer, default=MOST_NODES, help="nodes of a draft (%(default)s)")
    parser.add_argument("--vocabulary", type=positive_integer, default=152_064, help="tokens of a law (%(default)s)")
    parser.add_argument(
        "--repeats", type=positive_integer, default=5, help="runs of each, of which the median counts (%(default)s)"
    )
    parser.add_argument("--device", type=device_name, default="cpu", help="where the laws lie (%(default)s)")
    options = parser.parse_args(command_line)
    if options.nodes > MOST_NODES:
        parser.error(f"--nodes must be at most {MOST_NODES}, those of the shape, got {options.nodes}")
    if options.vocabulary < SUPPORT_SIZE:
        parser.error(f"--vocabulary must be at least {SUPPORT_SIZE}, the tokens of a law, got {options.vocabulary}")
    return options


def measure(options: argparse.Namespace) -> dict:
    device, generator = torch.device(options.device), np.random.default_rng(0)
    parents = TreeShape.paper().parents[: options.nodes].copy()
    say(f"drawing {options.rows} drafts and their target laws")
    batch = DraftBatch.concatenate([random_draft(parents, options.vocabulary, generator) for _ in range(options.rows)])
    probs, softmax_seconds = target_laws(batch.num_nodes, options, device=device)
    seconds, target = {"log_softmax": softmax_seconds}, TargetRows(probs)
    zeros = np.zeros(options.rows, dtype=np.int64)
    noise = VerifierNoise(0, rows=np.arange(options.rows), steps=zeros, positions=zeros)
    for name in TIMED_RULES:
        rule = get_verifier(name)
        parts = {"verify": lambda rule=rule: rule.verify(batch, target, noise)}
        if hasattr(rule, "thresholds"):
            parts["thresholds"] = lambda rule=rule: rule.thresholds(batch, target)
        for part, work in parts.items():
            say(f"timing {name}: {part}")
            seconds[f"{name} {part}"] = median_seconds(work, repeats=options.repeats, device=device)
    return {"num_nodes": batch.num_nodes, "seconds": seconds}


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    result = measure(options)
    seconds = result["seconds"]
    print(f"{options.rows} rows x {options.nodes} nodes, vocabulary {options.vocabulary}, {options.device}")
    print(f"{'part':24} {'ms':>10} {'of log_softmax':>16}")
    for part, value in seconds.items():
        print(f"{part:24} {value * 1e3:10.3f} {value / seconds['log_softmax']:16.4f}")
    print(json.dumps({**vars(options), **result, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
