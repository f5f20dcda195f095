"""Training of a head that guesses blocks: DFlash (arXiv 2602.06036), DFlash 2 or DSpark. At random places of a text it
guesses what comes next, and learns the laws that the target holds there. The target is frozen."""

from __future__ import annotations

from argparse import Namespace

import torch
from transformers import PreTrainedModel

from stand.drafters.dflash.head import DFlashHead
from stand.drafters.dflash.settings import CONFIG_FILE, DFlashSettings
from stand.drafters.heads.trained_part import FAMILIES, WEIGHT_FILE
from stand.forward.model import text_config
from training.checkpoint import FACTS
from training.generations import Generation, shuffled_batches
from training.head_training import MOST_LAW_NUMBERS, Recipe, places_for_laws
from training.layer_batch import LayerBatch, layer_batch

ANCHORS = 256  # blocks of a batch
DECAYS = {8: 4.0, 10: 5.0, 16: 7.0}  # by block size: a place weighs exp(-place / decay), as published heads are trained
EXTRAS = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_top_k": 16},
    "dspark": {},
}


class ContextKeys:
    """In place of a cache: keys and values of whole texts, then in front of those of blocks."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self._states:
            self._states[layer] = keys, values
            return keys, values
        return tuple(torch.cat(pair, dim=2) for pair in zip(self._states[layer], (keys, values), strict=True))


def settings_for(target: PreTrainedModel, options: Namespace) -> DFlashSettings:
    """Raises ValueError where options do not fit the target."""
    extras = dict(EXTRAS[options.head_kind])
    rank = {"dflash2": "selector_rank", "dspark": "markov_rank"}.get(options.head_kind)
    if rank is not None:
        extras[rank] = options.rank
    return DFlashSettings.for_target(
        target, num_layers=options.layers, most_read=options.layers_read, block_size=options.block_size,
        mask_token_id=options.mask_token_id, **extras,
    )  # fmt: skip


def new_head(target: PreTrainedModel, options: Namespace, generations: list[Generation]) -> DFlashHead:
    """What layers add is small at first, and their sum is scaled as the target's is."""
    head = DFlashHead(target, settings_for(target, options))
    with torch.no_grad():
        if text_config(target).model_type in FAMILIES:
            head.norm.weight.copy_(target.get_decoder().norm.weight)
        for layer in head.layers:
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight.mul_(0.2)
    return head


def anchors_of(batch: LayerBatch) -> torch.Tensor:
    """[R, n] int64: places of pending tokens, random ones whose next token counts; -1 where a text has too few."""
    most = max(ANCHORS // len(batch.counts), 1)
    known = batch.counts.clone()
    known[:, 0] = False  # nothing stands before it
    order = torch.rand(known.shape, device=known.device).masked_fill(~known, 2.0)
    found = torch.topk(order, min(most, order.shape[1]), dim=1, largest=False)
    return torch.where(found.values < 2.0, found.indices, -1)


def estimates_at(head: DFlashHead, batch: LayerBatch, anchors: torch.Tensor) -> torch.Tensor:
    """[R, n, G, D], of blocks that begin at `anchors` [R, n]."""
    size, (rows, count) = head.settings.block_size, anchors.shape
    length = batch.token_ids.shape[1]
    at = anchors.clamp(min=0)
    cache = ContextKeys()
    places = torch.arange(length, device=at.device)[None].expand(rows, -1)
    head.remember(head.combined(batch.hidden), places, cache)
    token_ids = torch.full((rows, count, size), head.settings.mask_token_id, device=at.device)
    token_ids[..., 0] = batch.token_ids.gather(1, at)
    positions = (at[..., None] + torch.arange(size, device=at.device)).flatten(1)
    told = [{"attention_mask": mask} for mask in masks_of(head, at, length)]
    estimates = head(token_ids.flatten(1), positions, cache=cache, seen=told)
    return estimates.view(rows, count, *estimates.shape[1:])


def masks_of(head: DFlashHead, at: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Per layer, bool [R, 1, n * B, L + n * B]: what places of blocks that begin at `at` [R, n] see, of texts of L
    tokens and of all blocks."""
    size = head.settings.block_size
    number = torch.arange(at.shape[1] * size, device=at.device)
    begins = at.repeat_interleave(size, dim=1)[..., None]  # [R, n * B, 1]
    places = begins + (number % size)[:, None]
    texts = torch.arange(length, device=at.device)
    is_own = number[:, None] // size == number // size
    kinds: dict[tuple[bool, int | None], torch.Tensor] = {}
    found = []
    for layer, is_causal in zip(head.layers, head.settings.is_causal, strict=True):
        window = layer.self_attn.sliding_window
        if (is_causal, window) not in kinds:
            before, block = texts < begins, is_own & (number <= number[:, None]) if is_causal else is_own
            if window is not None:
                before = before & (places - texts < window)
                block = block & (number[:, None] - number < window)
            block = block.expand(len(at), -1, -1)
            kinds[is_causal, window] = torch.cat([before, block], dim=2)[:, None]
        found.append(kinds[is_causal, window])
    return found


def compared(head: DFlashHead, batch: LayerBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all places of random blocks that count: (estimates [n, D], what the target's LM head reads there [n, D], the
    token before [n], its number in its block [n])."""
    num_places, length = head.settings.num_guesses, batch.token_ids.shape[1]
    anchors = anchors_of(batch)
    estimates = estimates_at(head, batch, anchors)
    steps = torch.arange(num_places, device=anchors.device)
    before = (anchors.clamp(min=0)[..., None] + steps).clamp(max=length - 1).flatten(1)  # [R, n * G]
    counts = batch.counts.gather(1, before) & (anchors >= 0).repeat_interleave(num_places, dim=1)
    last = batch.last.gather(1, before[..., None].expand(-1, -1, batch.last.shape[2]))
    tokens = batch.token_ids.gather(1, before)
    numbers = steps.repeat(anchors.numel()).view(tokens.shape)
    return estimates.flatten(1, 2)[counts], last[counts], tokens[counts], numbers[counts]


def head_loss(head: DFlashHead, batch: LayerBatch) -> tuple[torch.Tensor, float]:
    """(loss, share of places where head and target hold the same token the best)."""
    estimates, last, before, numbers = compared(head, batch)
    places = places_for_laws(len(estimates), head.num_guessed).to(last.device)
    estimates, before = estimates[places], before[places]
    size = head.settings.block_size
    weights = torch.exp(-numbers[places] / DECAYS.get(size, size / 2.3))
    weights = weights / weights.sum()
    device = last.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu"):  # where many CPUs are slow
        logits = head.logits(estimates)
        with torch.no_grad():
            wanted = head._model[0].get_output_embeddings()(last[places]).float().softmax(dim=-1)
        loss = (weights * torch.nn.functional.cross_entropy(logits, wanted, reduction="none")).sum()
        if head.pairs is not None:
            loss = loss + (weights * pair_loss(head, estimates, before, logits, wanted)).sum()
    is_same = logits.argmax(dim=-1) == wanted.argmax(dim=-1)
    return loss, is_same.sum().item() / max(len(is_same), 1)


def pair_loss(
    head: DFlashHead, estimates: torch.Tensor, before: torch.Tensor, logits: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """[n]: cross-entropy of the paired laws and the target's, among the likeliest tokens."""
    size = min(head.pairs.num_candidates, logits.shape[-1])
    scores, candidates = torch.topk(logits, size, dim=-1)
    paired = scores + head.pairs(estimates, before[:, None], candidates)[:, 0].float()
    masses = wanted.gather(-1, candidates)
    return -(masses * torch.log_softmax(paired, dim=-1)).sum(dim=-1)


@torch.no_grad()
def agreement_on(head: DFlashHead, target: PreTrainedModel, generations: list[Generation]) -> list[float]:
    """Per place, the share where head and target hold the same token the best, given the tokens before it."""
    num_places = head.settings.num_guesses
    same, count = [0] * num_places, [0] * num_places
    torch.manual_seed(0)  # of the places
    for part in shuffled_batches(generations, tokens_per_batch=8192, seed="agreement"):
        estimates, last, before, numbers = compared(head, layer_batch(head, target, part))
        most = max(MOST_LAW_NUMBERS // head.num_guessed, 1)  # at a time
        parts = zip(estimates.split(most), last.split(most), before.split(most), strict=True)
        is_same = torch.cat([is_guessed(head, target, *each) for each in parts])
        for place in range(num_places):
            same[place] += int(is_same[numbers == place].sum())
            count[place] += int((numbers == place).sum())
    return [round(one / max(all_, 1), 4) for one, all_ in zip(same, count, strict=True)]


def is_guessed(
    head: DFlashHead, target: PreTrainedModel, estimates: torch.Tensor, last: torch.Tensor, before: torch.Tensor
) -> torch.Tensor:
    """[n] bool: head and target hold the same token the best."""
    found = head.laws(estimates[:, None], before, temperature=1.0, count=1, width=1)
    guessed = (found.ids[:, 0, 0] if head.pairs is None else found.pair_ids[:, 0, 0, 0]).long()
    return guessed == target.get_output_embeddings()(last).argmax(dim=-1)


RECIPE = Recipe(
    "dflash",
    "hidden_norm.weight",
    new_head,
    DFlashHead.load,
    layer_batch,
    head_loss,
    agreement_on,
    files=frozenset({WEIGHT_FILE, CONFIG_FILE, FACTS}),
    check=settings_for,
)
