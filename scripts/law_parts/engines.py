"""The engines whose drafts are checked: a lookup, heads, streams and blends, warmed up on the prompts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from measuring.setup import DRAFTERS, load_trained

import stand
from law_parts.continuations import NODES_PER_ROW, rows_per_call, settings
from stand.drafters.dflash.head import DFlashHead
from stand.drafters.eagle.attached import attached
from stand.drafters.heads.trained_part import TrainedPart
from stand.drafters.streams.weights import Streams

DRAFTER_NAMES = (
    *("lookup", "blended", "eagle", "streams", "streams-blended", "neighbours"),
    *("dflash", "dflash-blended"),
)
KINDS = {"streams": Streams.load, "dflash": DFlashHead.load}  # by the first word of a drafter's name; else EAGLE's
HEADLESS = ("lookup", "neighbours")


def shipped_head(drafter: str) -> Path:
    kind = drafter.partition("-")[0]
    return DRAFTERS / (kind if kind in KINDS else "eagle")


def trained_part(model, options: argparse.Namespace) -> TrainedPart | None:
    """What the drafter needs beside the lookup. Raises ValueError where --head names another model's, or none."""
    if options.drafter in HEADLESS:
        return None
    load = KINDS.get(options.drafter.partition("-")[0], attached)
    return load_trained(load, model, options.head, option="--head", model=options.model)


def new_drafter(
    model, law: dict[str, float], *, kind: str, drafter: str, head: TrainedPart | Path | None
) -> stand.Drafter:
    budget, temperature = NODES_PER_ROW * rows_per_call(model), law["temperature"]
    if drafter == "eagle":
        return stand.EagleDrafter(head, budget=budget, temperature=temperature)
    if drafter == "streams":
        return stand.StreamingDrafter(head, budget=budget, temperature=temperature)
    if drafter == "dflash":
        return stand.DFlashDrafter(head, budget=budget, temperature=temperature)
    makers = {"blended": stand.EagleLaws, "streams-blended": stand.StreamLaws, "dflash-blended": stand.DFlashLaws}
    source = makers[drafter](head, temperature=temperature) if drafter in makers else None
    source = stand.NeighbourLaws() if drafter == "neighbours" else source
    return stand.BlendedDrafter(budget=budget, kind=kind, source=source)


def warmed_up(
    model, tokenizer, prompts: Sequence[Sequence[int]], law: dict[str, float], *, verifier: str, drafter: stand.Drafter
) -> stand.Engine:
    """An engine whose drafter has seen 64 continuations of every prompt."""
    rule = stand.verifiers.get_verifier(verifier, allow_lossy=True)
    engine = stand.wrap(model, tokenizer, drafter=drafter, verifier=rule)
    for prompt in prompts:
        engine.generate(input_ids=[prompt], num_return_sequences=64, max_new_tokens=12, **settings(law), seed=999)
    return engine


def new_engine(
    model,
    tokenizer,
    prompts,
    law,
    *,
    verifier: str,
    kind: str,
    drafter: str = "lookup",
    head: TrainedPart | Path | None = None,
) -> stand.Engine:
    """What draws the continuations of one arm; kind "none" is the arm without drafts."""
    if kind == "none":
        return stand.wrap(model, tokenizer, verifier=verifier)
    drafts = new_drafter(model, law, kind=kind, drafter=drafter, head=head or shipped_head(drafter))
    return warmed_up(model, tokenizer, prompts, law, verifier=verifier, drafter=drafts)
