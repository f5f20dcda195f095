"""Which drafter keeps more at equal draft nodes? Tokens per step of the lookup, a head, streams, and blends of them.

An EAGLE head or streams draft alone, or they or nearest neighbours are blended with the lookup; by number of samples.

    python scripts/compare_drafters.py                                        # bundled model and its shipped head
    python scripts/compare_drafters.py --model smollm2 --head eagle_smollm2   # a head of your own
    python scripts/compare_drafters.py --head random --arms lookup,blended    # what an untrained head costs
    python scripts/compare_drafters.py --arms none,streams,streams-nodes      # streams at every node, as in the paper

Every arm draws the same problems with the same seeds, `--nodes` draft nodes per row and step, or with `--nodes cost` as
many as pay by the measured costs of steps, as in use. Drafters start anew with every problem, so what the lookup knows
at sample n are the samples before and beside it; with `--lookup-scope run` they are kept from problem to problem, as an
engine keeps them. A table per temperature goes to stdout, then one JSON line with all figures; progress goes to stderr.
Shares and nodes are per row and step: `kept_by_depth` has the share of steps that kept a node of depth 1, 2, ...,
`draft_share` is of the steps' time, `processor_ms_per_token` of the whole call. Every arm draws a few tokens first that
do not count: steps are timed then.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
import torch
from measuring.idle_options import refuse_idle
from measuring.interruption import run_and_report
from measuring.option_types import count_list, number_from_zero, positive_integer
from measuring.progress import Progress
from measuring.setup import DRAFTERS, add_options, fill_defaults, load_model, load_tasks, load_trained, prompt_ids
from measuring.text_table import format_table
from measuring.trajectories import Sampling, draw_with_engine

import stand
from stand.drafters.dflash.head import DFlashHead
from stand.drafters.eagle.attached import attached
from stand.drafters.eagle.feature_head import FeatureHead
from stand.drafters.eagle.growth import PAPER_SHAPE
from stand.drafters.eagle.head import EagleHead
from stand.drafters.eagle.laws import MOST_RUNS
from stand.drafters.streams.weights import Streams

SHIPPED = {"head": DRAFTERS / "eagle", "streams": DRAFTERS / "streams", "dflash": DRAFTERS / "dflash"}
RANDOM = "random"
NO_DRAFTS = "none"
COST = "cost"
WARM_UP_TOKENS = 8
ARMS = (
    *(NO_DRAFTS, "lookup", "eagle", "blended", "streams", "streams-nodes", "streams-blended", "neighbours"),
    *("dflash", "dflash-chain", "dflash-blended"),
)
ALONE = {"eagle", "streams", "streams-nodes", "dflash", "dflash-chain"}  # arms without the lookup
DEFAULT_ARMS = ("lookup", "eagle", "blended")
OF_ARMS = {  # arms that an option has an effect on
    "head": {"eagle", "blended"},
    "streams": {"streams", "streams-nodes", "streams-blended"},
    "dflash": {"dflash", "dflash-chain", "dflash-blended"},
    "runs": {"eagle", "blended", "streams-blended", "neighbours", "dflash-blended"},
}
HEADER = (
    "N", "drafter", "tokens per step", "depth 1 kept", "nodes per step", "drafting, share of time", "tokens per second",
    "processor ms per token",
)  # fmt: skip


def drafter_makers(
    arguments: argparse.Namespace,
    head: FeatureHead | None,
    streams: Streams | None,
    dflash: DFlashHead | None,
    temperature: float,
) -> dict[str, Callable[[int], stand.Drafter]]:
    """Name of an arm: its drafter for so many rows."""
    law = {"temperature": temperature or 1.0}
    nodes = arguments.nodes
    makers: dict[str, Callable[[int], stand.Drafter]] = {
        "lookup": lambda rows: stand.BlendedDrafter(budget=nodes and nodes * rows),
        "eagle": lambda rows: stand.EagleDrafter(head, budget=nodes * rows, runs=arguments.runs, **law),
        "blended": lambda rows: stand.BlendedDrafter(
            budget=nodes and nodes * rows, source=stand.EagleLaws(head, runs=arguments.runs, **law)
        ),
        NO_DRAFTS: lambda rows: stand.BlendedDrafter(budget=0),
        "streams": lambda rows: stand.StreamingDrafter(streams, budget=nodes * rows, **law),
        "streams-nodes": lambda rows: stand.StreamingDrafter(streams, budget=nodes * rows, placement="nodes", **law),
        "streams-blended": lambda rows: stand.BlendedDrafter(
            budget=nodes and nodes * rows, source=stand.StreamLaws(streams, always=arguments.runs is not None, **law)
        ),
        "neighbours": lambda rows: stand.BlendedDrafter(
            budget=nodes and nodes * rows, source=stand.NeighbourLaws(runs=arguments.runs)
        ),
        "dflash": lambda rows: stand.DFlashDrafter(dflash, budget=nodes * rows, **law),
        "dflash-chain": lambda rows: stand.DFlashDrafter(dflash, budget=nodes * rows, is_chain=True, **law),
        "dflash-blended": lambda rows: stand.BlendedDrafter(
            budget=nodes and nodes * rows, source=stand.DFlashLaws(dflash, always=arguments.runs is not None, **law)
        ),
    }
    makers = {name: make for name, make in makers.items() if name in arguments.arms}
    if nodes == PAPER_SHAPE.num_nodes - 1 and "eagle" in arguments.arms:
        makers["eagle, paper's tree"] = lambda rows: stand.EagleDrafter(head, shape=PAPER_SHAPE, **law)
    return makers


def head_of(arguments: argparse.Namespace, model) -> FeatureHead | None:
    is_asked = OF_ARMS["head"] & set(arguments.arms)
    return _trained(arguments, "head", EagleHead, attached, model) if is_asked else None


def streams_of(arguments: argparse.Namespace, model) -> Streams | None:
    is_asked = OF_ARMS["streams"] & set(arguments.arms)
    return _trained(arguments, "streams", Streams, Streams.load, model) if is_asked else None


def dflash_of(arguments: argparse.Namespace, model) -> DFlashHead | None:
    if not OF_ARMS["dflash"] & set(arguments.arms):
        return None
    return _loaded(arguments, "dflash", DFlashHead.load, model, str(arguments.dflash or SHIPPED["dflash"]))


def _trained(arguments: argparse.Namespace, option: str, kind: type, load: Callable, model):
    """What the option names, or what has random weights. Raises ValueError where it was not trained for the model."""
    name = str(getattr(arguments, option) or SHIPPED[option])
    if name == RANDOM:
        torch.manual_seed(arguments.seed)
        return kind(model).eval()
    return _loaded(arguments, option, load, model, name)


def _loaded(arguments: argparse.Namespace, option: str, load: Callable, model, name: str):
    told = {"option": f"--{option}", "model": arguments.model, "remedy": "name that, or leave out its --arms"}
    return load_trained(load, model, Path(name), **told)


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    """One record per temperature, number of samples and arm, as each is finished."""
    torch.set_num_threads(arguments.threads)
    tasks = load_tasks(arguments)
    model, tokenizer = load_model(arguments)
    trained = head_of(arguments, model), streams_of(arguments, model), dflash_of(arguments, model)
    new_engine = partial(stand.wrap, model, tokenizer, verifier=arguments.verifier)
    prompts = [prompt_ids(tokenizer, task, arguments.instruction) for task in tasks]
    names = list(drafter_makers(arguments, *trained, 1.0))
    progress = Progress(len(arguments.temperatures) * sum(arguments.trajectories) * len(names) * len(tasks))
    for temperature in arguments.temperatures:
        for count in arguments.trajectories:
            rows = min(arguments.rows or count, count)
            sampling = Sampling(
                rows, arguments.max_new_tokens, temperature, arguments.top_k, arguments.top_p, arguments.seed
            )
            for name, make in drafter_makers(arguments, *trained, temperature).items():
                stats, used, engine, draft = stand.Stats(), 0.0, None, name != NO_DRAFTS
                warm_up(new_engine(drafter=make(rows)), prompts[0], sampling, draft=draft)
                for index, prompt in enumerate(prompts):
                    if engine is None or arguments.lookup_scope == "problem":
                        engine = new_engine(drafter=make(rows))
                    started = time.process_time()
                    stats += draw_with_engine(engine, prompt, count, sampling, problem=index, draft=draft).stats
                    used += time.process_time() - started
                    progress.add(count, f"T = {temperature}, N = {count}, {name}, problem {index + 1}")
                yield record(temperature, count, name, stats, used)


def warm_up(engine: stand.Engine, prompt: list[int], sampling: Sampling, *, draft: bool) -> None:
    """A few tokens with an engine that is thrown away: what only a first call does, such as timing steps, is in no
    figure."""
    few = replace(sampling, max_new_tokens=min(WARM_UP_TOKENS, sampling.max_new_tokens))
    draw_with_engine(engine, prompt, sampling.rows, few, problem=0, draft=draft)


def record(temperature: float, count: int, name: str, stats: stand.Stats, used: float) -> dict:
    """What one arm came to; used: seconds of the processor, which other work on the machine does not change much."""
    kept = stats.accepted_by_depth
    return {
        "temperature": temperature,
        "samples": count,
        "drafter": name,
        "tokens_per_step": stats.mean_acceptance_length,
        "depth_1_kept": float(kept[0] / stats.num_steps) if len(kept) else 0.0,
        "nodes_per_step": stats.num_draft_tokens / stats.num_steps,
        "draft_share": stats.seconds["draft"] / sum(stats.seconds.values()),
        "tokens_per_second": stats.tokens_per_second,
        "processor_ms_per_token": 1e3 * used / stats.num_tokens,
        "kept_by_depth": [float(number / stats.num_steps) for number in kept[:8]],
    }


def tables(records: list[dict]) -> str:
    columns = ("tokens_per_step", "depth_1_kept", "nodes_per_step", "draft_share", "tokens_per_second",
               "processor_ms_per_token")  # fmt: skip
    parts = []
    for temperature in dict.fromkeys(one["temperature"] for one in records):
        rows = [
            (str(one["samples"]), one["drafter"], *(one[column] for column in columns))
            for one in records
            if one["temperature"] == temperature
        ]
        parts.append(f"temperature {temperature}\n{format_table(HEADER, rows)}")
    return "\n\n".join(parts)


def number_list(text: str) -> list[float]:
    """Numbers of at least 0 with commas between, as 0,0.8."""
    return [number_from_zero(part) for part in text.split(",")]


def node_count(text: str) -> int | None:
    """None where the measured cost of steps decides."""
    if text == COST:
        return None
    try:
        return positive_integer(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {COST}") from None


def new_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, refused=("--temperature",))
    parser.add_argument(
        "--temperatures", type=number_list, default=[0.0, 0.8], metavar="T,T,...", help="0 is greedy (default: 0,0.8)"
    )
    parser.add_argument(
        "--trajectories",
        type=count_list,
        default=[1, 4, 16],
        metavar="N,N,...",
        help="samples per problem (default: 1,4,16)",
    )
    parser.add_argument(
        "--head",
        type=Path,
        help="folder or file of an EAGLE-1 or EAGLE-3 head, or random (default: the bundled model's)",
    )
    parser.add_argument(
        "--streams",
        type=Path,
        help="folder or file of streams, or random (default: the bundled model's)",
    )
    parser.add_argument(
        "--dflash", type=Path, help="folder of a head that guesses blocks (default: the bundled model's)"
    )
    parser.add_argument(
        "--nodes",
        type=node_count,
        default=8,
        help="draft nodes per row, or `cost` for as many as pay (default: 8); 25 adds the paper's tree",
    )
    parser.add_argument(
        "--runs",
        type=positive_integer,
        help="most runs of the head or of neighbours per step; blended streams and blocks then run in each (default: "
        f"{MOST_RUNS}; blended as many as pay)",
    )
    parser.add_argument(
        "--arms",
        type=lambda text: text.split(","),
        default=DEFAULT_ARMS,
        metavar="ARM,ARM",
        help=f"{', '.join(ARMS)} (default: {','.join(DEFAULT_ARMS)})",
    )
    parser.add_argument(
        "--lookup-scope", choices=("problem", "run"), default="problem", help="when drafters start anew (%(default)s)"
    )  # fmt: skip
    parser.add_argument("--verifier", default="traversal", help="rule by name (%(default)s)")
    return parser


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser()
    arguments = parser.parse_args(command_line)
    if set(arguments.arms) - set(ARMS):
        parser.error(f"--arms must be some of {','.join(ARMS)}, got {','.join(arguments.arms)}")
    refuse_idle(parser, arguments, "arms", OF_ARMS)
    if arguments.nodes is None and ALONE & set(arguments.arms):
        parser.error("--nodes cost is for the lookup and blended arms; leave the others out of --arms")
    if arguments.temperature is not None:
        parser.error("--temperature is one number; give --temperatures, such as 0,0.8")
    fill_defaults(arguments)
    return arguments


def main() -> int:
    return run_and_report("compare_drafters", measure(read_arguments()), report)


def report(records: list[dict]) -> None:
    print(tables(records), end="\n\n")
    print(json.dumps(records))


if __name__ == "__main__":
    sys.exit(main())
