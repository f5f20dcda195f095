"""Training of an EAGLE-3 head (arXiv 2503.01840) by the paper's training-time test: several estimates in a row, each
made from the one before, and the cross-entropy of their laws. The target is frozen and computes its states anew."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stand.drafters.eagle.eagle3_head import Eagle3Head
from stand.drafters.eagle.eagle3_settings import CONFIG_FILE, Eagle3Settings
from stand.drafters.heads.trained_part import FAMILIES, WEIGHT_FILE, rows_of
from stand.forward.model import text_config
from training.checkpoint import FACTS
from training.generations import Generation, frequent_tokens, shuffled_batches
from training.head_training import Recipe, places_for_laws
from training.layer_batch import LayerBatch, layer_batch

DEPTH = 4  # estimates in a row
DECAY = 0.8  # of the loss's weight with each of them, as in SpecForge
UNROLLED = "stand_unrolled"  # the attention of a training, by its name in transformers


def new_head(target: PreTrainedModel, options: Namespace, generations: list[Generation]) -> Eagle3Head:
    """Guesses the most frequent tokens of the texts, and reads them at first as the target does."""
    lm_head, vocabulary = target.get_output_embeddings(), None
    if options.vocabulary_size < lm_head.weight.shape[0]:
        vocabulary = torch.tensor(sorted(frequent_tokens(generations, options.vocabulary_size)))
    head = Eagle3Head(target, Eagle3Settings.for_target(target), vocabulary=vocabulary)
    with torch.no_grad():
        head.lm_head.weight.copy_(lm_head.weight if vocabulary is None else lm_head.weight[head.vocabulary])
        if text_config(target).model_type in FAMILIES:
            head.norm.weight.copy_(target.get_decoder().norm.weight)
    return head


def unrolled(head: Eagle3Head, batch: LayerBatch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Depth by depth, (estimates that count [n, D], what the target's LM head reads there [n, D]).

    Column i holds the chain that goes on from feature i by the tokens of the text. Its d-th estimate is of feature
    i + d; it sees the features up to i, and the estimates of its own column.
    """
    features, length = head.combined(batch.hidden[:, :-1]), batch.token_ids.shape[1]
    places = torch.arange(length - 1, device=features.device)[None]
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
    head.config._attn_implementation = UNROLLED
    for depth in range(1, min(DEPTH, length - 1) + 1):
        token_ids = torch.nn.functional.pad(batch.token_ids[:, depth:], (0, depth - 1))
        features = head(features, token_ids, places + depth - 1, attention_mask=None, earlier=earlier)
        kept = length - depth
        counts = batch.counts[:, depth:]
        yield features[:, :kept][counts], batch.last[:, depth:][counts]


def unrolled_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    earlier: list[tuple[torch.Tensor, torch.Tensor]],
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention of [B, H, N, D] over the first pass up to each column, and over the column's own later ones."""
    earlier.append((key, value))
    count = query.shape[2]
    own = torch.eye(count, dtype=torch.bool, device=query.device)
    seen = torch.cat([torch.ones_like(own).tril(), *[own] * (len(earlier) - 1)], dim=1)
    keys, values = (torch.cat(part, dim=2) for part in zip(*earlier, strict=True))
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=seen, scale=scaling, enable_gqa=True
    )
    return mixed.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(UNROLLED, unrolled_attention)


def head_loss(head: Eagle3Head, batch: LayerBatch) -> tuple[torch.Tensor, float]:
    """(loss, share of places where the first estimates and the target hold the same token the best)."""
    lm_head = head._model[0].get_output_embeddings()
    lm_head = lm_head if head.vocabulary is None else rows_of(lm_head, head.vocabulary)
    loss, agreement = torch.zeros((), device=batch.hidden.device), 0.0
    for depth, (estimates, last) in enumerate(unrolled(head, batch)):
        places = places_for_laws(len(estimates), head.num_guessed).to(last.device)
        with torch.autocast(last.device.type, dtype=torch.bfloat16):
            logits = head.logits(estimates[places])
            with torch.no_grad():
                wanted = lm_head(last[places])
            loss = loss + DECAY**depth * torch.nn.functional.cross_entropy(logits, wanted.softmax(dim=-1))
        if depth == 0:
            agreement = (logits.argmax(dim=-1) == wanted.argmax(dim=-1)).float().mean().item()
    return loss, agreement


@torch.no_grad()
def agreement_on(head: Eagle3Head, target: PreTrainedModel, generations: list[Generation]) -> list[float]:
    """Per depth, the share of places where head and target hold the same token the best, given the tokens before it."""
    same, count = [0] * DEPTH, [0] * DEPTH
    for part in shuffled_batches(generations, tokens_per_batch=8192, seed="agreement"):
        for depth, (estimates, last) in enumerate(unrolled(head, layer_batch(head, target, part))):
            guessed = head.best_tokens(estimates, temperature=1.0, count=1)[0][:, 0]
            best = target.get_output_embeddings()(last).argmax(dim=-1)
            same[depth], count[depth] = same[depth] + int((guessed == best).sum()), count[depth] + len(best)
    return [one / max(all_, 1) for one, all_ in zip(same, count, strict=True)]


RECIPE = Recipe(
    "eagle3",
    "midlayer.hidden_norm.weight",
    new_head,
    Eagle3Head.load,
    layer_batch,
    head_loss,
    agreement_on,
    files=frozenset({WEIGHT_FILE, CONFIG_FILE, FACTS}),
)
