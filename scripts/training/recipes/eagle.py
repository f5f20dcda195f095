"""Training of an EAGLE-1 head by the paper's recipe: Smooth-L1 on features and 0.1 times the cross-entropy of the laws,
with uniform noise of +-0.1 on the features that go in. The target is frozen and computes its features anew."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from stand.drafters.eagle.head import EagleHead
from training.generations import Generation, shuffled_batches
from training.head_training import Recipe, padded_tokens, places_for_laws

NOISE = 0.1
LAW_WEIGHT = 0.1  # of the cross-entropy beside the Smooth-L1 loss


@dataclass(frozen=True, slots=True)
class HeadBatch:
    """Pairs of one batch: what goes in, what should come out, and where it counts."""

    features: torch.Tensor  # [B, L, D] of tokens 0 .. L-1
    token_ids: torch.Tensor  # [B, L] the tokens after them
    targets: torch.Tensor  # [B, L, D] the next features
    counts: torch.Tensor  # [B, L] bool: the next feature's law wrote a token of the generation
    positions: torch.Tensor  # [1, L]

    @property
    def nbytes(self) -> int:
        return self.features.untyped_storage().nbytes()


@torch.no_grad()
def head_batch(target: PreTrainedModel, generations: list[Generation]) -> HeadBatch:
    """Padding is on the right, so causality hides it."""
    token_ids = padded_tokens(generations).to(target.device)
    length = token_ids.shape[1]
    counts = torch.zeros(len(generations), length - 1, dtype=torch.bool, device=target.device)
    for row, one in enumerate(generations):
        counts[row, max(one.prompt_length - 2, 0) : len(one.token_ids) - 2] = True
    features = target.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    positions = torch.arange(length - 1, device=target.device)[None]
    return HeadBatch(features[:, :-1], token_ids[:, 1:], features[:, 1:], counts, positions)


def head_loss(head: EagleHead, batch: HeadBatch) -> tuple[torch.Tensor, float]:
    """(loss, share of places where head and target hold the same token the best)."""
    noise = torch.empty_like(batch.features).uniform_(-NOISE, NOISE)
    predicted = head(batch.features + noise, batch.token_ids, batch.positions)[batch.counts]
    targets = batch.targets[batch.counts]
    places = places_for_laws(len(targets), head.config.vocab_size).to(targets.device)
    with torch.autocast(targets.device.type, dtype=torch.bfloat16):
        logits = head.logits(predicted[places])
        with torch.no_grad():
            wanted = head.logits(targets[places])
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
        guessed = head.best_tokens(predicted, temperature=1.0, count=1)[0][:, 0]
        best = head.logits(batch.targets[batch.counts]).argmax(dim=-1)
        same, count = same + int((guessed == best).sum()), count + len(predicted)
    return same / max(count, 1)


RECIPE = Recipe(
    "eagle",
    "fc.bias",
    lambda target, options, generations: EagleHead(target),
    EagleHead.load,
    lambda head, target, generations: head_batch(target, generations),
    head_loss,
    agreement_on,
)
