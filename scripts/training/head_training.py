"""The loop that trains a head of a frozen target on the target's own generations, whatever the head is."""

from __future__ import annotations

import json
import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from measuring.progress import duration, say
from transformers import PreTrainedModel

from stand.drafters.heads.trained_part import WEIGHT_FILE
from training.checkpoint import FACTS, load_state, save_state
from training.generations import Generation, shuffled_batches
from training.master_weights import MasterAdamW
from training.trainer import apply_step, budget_share, rate_at

REPORT_STEPS = 20
MOST_LAW_NUMBERS = 1 << 25  # of the laws that one batch compares: with many tokens in them, at fewer places
KEPT_BYTES = 1 << 30  # of what the target computed, in memory, so that it does so once; the rest anew in every pass


class Batch(Protocol):
    """What the target computed of some generations."""

    counts: torch.Tensor  # bool: the places that count
    nbytes: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """How heads of one kind are made, trained and judged."""

    name: str  # of the kind; the weights of the bundled model's lie in scripts/drafters/<name>
    tensor: str  # that is in every file of this kind and in no other
    make: Callable[[PreTrainedModel, Namespace, list[Generation]], torch.nn.Module]
    load: Callable[[PreTrainedModel, Path], torch.nn.Module]
    batch: Callable[[torch.nn.Module, PreTrainedModel, list[Generation]], Batch]
    loss: Callable[[torch.nn.Module, Batch], tuple[torch.Tensor, float]]  # and the share of equal best tokens
    agreement: Callable[[torch.nn.Module, PreTrainedModel, list[Generation]], object]  # the same on held-out texts
    files: frozenset[str] = frozenset({WEIGHT_FILE, FACTS})  # that a folder of trained weights holds
    check: Callable[[PreTrainedModel, Namespace], object] | None = None  # raises ValueError before texts are written


def padded_tokens(generations: list[Generation]) -> torch.Tensor:
    """[B, L] int64, padded on the right, so that causality hides it."""
    token_ids = torch.zeros(len(generations), max(len(one.token_ids) for one in generations), dtype=torch.int64)
    for row, one in enumerate(generations):
        token_ids[row, : len(one.token_ids)] = torch.tensor(one.token_ids)
    return token_ids


def places_for_laws(count: int, vocabulary_size: int) -> torch.Tensor:
    """Random ones of `count` places, ascending: as many as may be compared in a batch, all of them where that is so."""
    most = max(MOST_LAW_NUMBERS // vocabulary_size, 1)
    return torch.arange(count) if count <= most else torch.randperm(count)[:most].sort().values


def train_head(
    recipe: Recipe,
    head: torch.nn.Module,
    target: PreTrainedModel,
    generations: list[Generation],
    folder: Path,
    *,
    minutes: float,
    steps: int | None,
    tokens_per_batch: int,
    learning_rate: float,
    save_minutes: float,
    seed: int,
) -> dict:
    """Train until `minutes`, or `steps` where they are given, are used up; `folder`/state.pt continues a run. One that
    has ended stays as it is."""
    target.requires_grad_(False)
    head.config._attn_implementation = "sdpa"  # whole sequences; drafting sets its own
    optimizers = [MasterAdamW(head.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)]
    progress = {"step": 0, "tokens": 0, "seconds": 0.0}
    state = folder / "state.pt"
    if state.exists():
        progress = load_state(state, head, optimizers)
        say(f"goes on from step {progress['step']}")
    parts = list(shuffled_batches(generations, tokens_per_batch=tokens_per_batch, seed=f"{seed}"))
    batches = _endless(recipe, head, target, parts, seed=f"{seed} {progress['step']}")
    begin, earlier, saved = time.monotonic(), progress["seconds"], time.monotonic()
    recent: list[tuple[float, float]] = []
    used = budget_share(progress, minutes=minutes, steps=steps)
    while used < 1.0:
        batch = next(batches)
        loss, agreement = recipe.loss(head, batch)
        loss.backward()
        recent.append((loss.item(), agreement))
        progress["seconds"] = earlier + time.monotonic() - begin
        progress["step"] += 1
        used = budget_share(progress, minutes=minutes, steps=steps)
        apply_step(head, optimizers, learning_rate * rate_at(used, progress["step"] - 1))
        progress["tokens"] += int(batch.counts.sum())
        if progress["step"] % REPORT_STEPS == 0 or used >= 1.0:
            _report(recent, used, progress)
            recent.clear()
        if time.monotonic() - saved > 60 * save_minutes:
            save_state(state, head, optimizers, progress)
            saved = time.monotonic()
    save_state(state, head, optimizers, progress)
    return progress


def _endless(
    recipe: Recipe, head: torch.nn.Module, target: PreTrainedModel, parts: list[list[Generation]], *, seed: str
) -> Iterator[Batch]:
    """Pass after pass, each in an order of its own."""
    rng, order = random.Random(seed), list(range(len(parts)))
    kept: dict[int, Batch] = {}
    room = KEPT_BYTES
    while True:
        rng.shuffle(order)
        for place in order:
            batch = kept.get(place)
            if batch is None:
                batch = recipe.batch(head, target, parts[place])
                room -= batch.nbytes
                if room >= 0:
                    kept[place] = batch
            yield batch


def _report(recent: list[tuple[float, float]], used: float, progress: dict) -> None:
    loss, agreement = (sum(column) / len(recent) for column in zip(*recent, strict=True))
    left = max(progress["seconds"] / used - progress["seconds"], 0.0)
    say(f"step {progress['step']}: loss {loss:.4f}, same best token {agreement:.3f}, {duration(left)} left")


def describe(folder: Path, facts: dict) -> None:
    """Write `training.json` next to the weights: how they were made."""
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
