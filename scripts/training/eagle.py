"""Training of an EAGLE-1 head by the paper's recipe: Smooth-L1 on features and 0.1 times the cross-entropy of the laws,
with uniform noise of +-0.1 on the features that go in. The target is frozen and computes its features anew."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring.progress import duration, say
from transformers import PreTrainedModel

from stand.drafters.eagle.head import EagleHead
from training.checkpoint import load_state, save_state
from training.generations import Generation, shuffled_batches
from training.trainer import apply_step, rate_at

NOISE = 0.1
LAW_WEIGHT = 0.1  # of the cross-entropy beside the Smooth-L1 loss
REPORT_STEPS = 20
KEPT_BYTES = 1 << 30  # of features in memory, so that the target computes them once; the rest anew in every pass


@dataclass(frozen=True, slots=True)
class HeadBatch:
    """Pairs of one batch: what goes in, what should come out, and where it counts."""

    features: torch.Tensor  # [B, L, D] of tokens 0 .. L-1
    token_ids: torch.Tensor  # [B, L] the tokens after them
    targets: torch.Tensor  # [B, L, D] the next features
    counts: torch.Tensor  # [B, L] bool: the next feature's law wrote a token of the generation
    positions: torch.Tensor  # [1, L]


@torch.no_grad()
def head_batch(target: PreTrainedModel, generations: list[Generation]) -> HeadBatch:
    """Padding is on the right, so causality hides it."""
    length = max(len(one.token_ids) for one in generations)
    token_ids = torch.zeros(len(generations), length, dtype=torch.int64)
    counts = torch.zeros(len(generations), length - 1, dtype=torch.bool)
    for row, one in enumerate(generations):
        token_ids[row, : len(one.token_ids)] = torch.tensor(one.token_ids)
        counts[row, max(one.prompt_length - 2, 0) : len(one.token_ids) - 2] = True
    token_ids, counts = token_ids.to(target.device), counts.to(target.device)
    features = target.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    positions = torch.arange(length - 1, device=target.device)[None]
    return HeadBatch(features[:, :-1], token_ids[:, 1:], features[:, 1:], counts, positions)


def head_loss(head: EagleHead, batch: HeadBatch) -> tuple[torch.Tensor, float]:
    """(loss, share of places where head and target hold the same token the best)."""
    noise = torch.empty_like(batch.features).uniform_(-NOISE, NOISE)
    predicted = head(batch.features + noise, batch.token_ids, batch.positions)[batch.counts]
    targets = batch.targets[batch.counts]
    logits = head.logits(predicted)
    with torch.no_grad():
        wanted = head.logits(targets)
    cross_entropy = torch.nn.functional.cross_entropy(logits, wanted.softmax(dim=-1))
    agreement = (logits.argmax(dim=-1) == wanted.argmax(dim=-1)).float().mean().item()
    return torch.nn.functional.smooth_l1_loss(predicted, targets) + LAW_WEIGHT * cross_entropy, agreement


@torch.no_grad()
def agreement_on(head: EagleHead, target: PreTrainedModel, generations: list[Generation]) -> float:
    """Share of places where head and target hold the same token the best, given the true features before it."""
    same = count = 0
    for part in shuffled_batches(generations, tokens_per_batch=8192, seed="agreement"):
        batch = head_batch(target, part)
        predicted = head(batch.features, batch.token_ids, batch.positions)[batch.counts]
        best = head.logits(predicted).argmax(dim=-1), head.logits(batch.targets[batch.counts]).argmax(dim=-1)
        same, count = same + int((best[0] == best[1]).sum()), count + len(predicted)
    return same / max(count, 1)


def train_head(
    head: EagleHead,
    target: PreTrainedModel,
    generations: list[Generation],
    folder: Path,
    *,
    minutes: float,
    steps: int,
    tokens_per_batch: int,
    learning_rate: float,
    save_minutes: float,
    seed: int,
) -> dict:
    """Train until `minutes`, or `steps` where they are not 0, are used up; `folder`/state.pt continues a run."""
    target.requires_grad_(False)
    head.config._attn_implementation = "sdpa"  # whole sequences; drafting sets its own
    optimizers = [torch.optim.AdamW(head.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)]
    progress = {"step": 0, "tokens": 0, "seconds": 0.0}
    state = folder / "state.pt"
    if state.exists():
        progress = load_state(state, head, optimizers)
        say(f"goes on from step {progress['step']}")
    parts = list(shuffled_batches(generations, tokens_per_batch=tokens_per_batch, seed=f"{seed}"))
    batches = _endless(target, parts, seed=f"{seed} {progress['step']}")
    begin, earlier, saved = time.monotonic(), progress["seconds"], time.monotonic()
    recent: list[tuple[float, float]] = []
    used = 0.0
    while used < 1.0:
        batch = next(batches)
        loss, agreement = head_loss(head, batch)
        loss.backward()
        recent.append((loss.item(), agreement))
        progress["seconds"] = earlier + time.monotonic() - begin
        used = (progress["step"] + 1) / steps if steps else progress["seconds"] / (60 * minutes)
        apply_step(head, optimizers, learning_rate * rate_at(used, progress["step"]))
        progress["step"] += 1
        progress["tokens"] += int(batch.counts.sum())
        if progress["step"] % REPORT_STEPS == 0:
            _report(recent, used, progress)
            recent.clear()
        if time.monotonic() - saved > 60 * save_minutes:
            save_state(state, head, optimizers, progress)
            saved = time.monotonic()
    save_state(state, head, optimizers, progress)
    return progress


def _endless(target: PreTrainedModel, parts: list[list[Generation]], *, seed: str) -> Iterator[HeadBatch]:
    """Pass after pass, each in an order of its own."""
    rng, order = random.Random(seed), list(range(len(parts)))
    kept: dict[int, HeadBatch] = {}
    room = KEPT_BYTES
    while True:
        rng.shuffle(order)
        for place in order:
            batch = kept.get(place)
            if batch is None:
                batch = head_batch(target, parts[place])
                room -= batch.features.untyped_storage().nbytes()
                if room >= 0:
                    kept[place] = batch
            yield batch


def _report(recent: list[tuple[float, float]], used: float, progress: dict) -> None:
    loss, agreement = (sum(column) / len(recent) for column in zip(*recent, strict=True))
    left = progress["seconds"] / used - progress["seconds"]
    say(f"step {progress['step']}: loss {loss:.4f}, same best token {agreement:.3f}, {duration(left)} left")


def describe(folder: Path, facts: dict) -> None:
    """Write `training.json` next to the weights: how they were made."""
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
