"""Training of streams beside a frozen target: stream j learns, at every token, the law that the target itself holds j
places later (cross-entropy of the two laws; arXiv 2402.11131, without the terms that tune the target)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from stand.drafters.streams.weights import Streams
from stand.forward.cache.cache_argument import cache_argument
from training.generations import Generation, shuffled_batches
from training.head_training import Recipe, padded_tokens, places_for_laws

SHARE = 0.5  # of the places of a batch that a training step takes


class FrozenKeys:
    """The target's keys [B, Hkv, L, D] by layer; streams' keys stand behind them for the length of a layer."""

    def __init__(self, keys: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.keys = keys

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys[layer_idx]
        return torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """What the target computed of whole texts, and where its laws wrote a token of the generation."""

    hidden: torch.Tensor  # [B, L, D] at the input of the streams' first layer
    keys: FrozenKeys
    features: torch.Tensor  # [B, L, D] after the final norm
    counts: torch.Tensor  # [B, L, gamma] bool: the target's law j places on wrote a token of the generation

    @property
    def nbytes(self) -> int:
        keys = [part for pair in self.keys.keys.values() for part in pair]
        return sum(part.untyped_storage().nbytes() for part in (self.hidden, self.features, *keys))


@torch.no_grad()
def stream_batch(streams: Streams, target: PreTrainedModel, generations: list[Generation]) -> StreamBatch:
    """Padding is on the right, so causality hides it."""
    token_ids = padded_tokens(generations).to(target.device)
    output = target.base_model(input_ids=token_ids, use_cache=True, output_hidden_states=True)
    first, layers = streams.first_layer, output[cache_argument(target.base_model)].layers
    keys = {place: (layer.keys, layer.values) for place, layer in enumerate(layers) if place >= first}
    counts = torch.zeros(*token_ids.shape, streams.num_streams, dtype=torch.bool, device=target.device)
    for row, one in enumerate(generations):
        for stream in range(streams.num_streams):
            counts[row, one.prompt_length - 1 : max(len(one.token_ids) - 2 - stream, 0), stream] = True
    # The LM head takes features after the final norm, which transformers gives as the last hidden state.
    return StreamBatch(output.hidden_states[first], FrozenKeys(keys), output.last_hidden_state, counts)


def stream_states(streams: Streams, batch: StreamBatch, places: torch.Tensor) -> torch.Tensor:
    """[B, P, gamma, D]: the streams of the tokens at `places` [P], as the LM head takes them."""
    count, gamma = len(places), streams.num_streams
    states = streams.begin(batch.hidden[:, places])
    num_rows, length = batch.hidden.shape[:2]
    of_stream = torch.arange(gamma, device=places.device)
    positions = (places[:, None] + 1 + of_stream).flatten()
    seen = torch.arange(length, device=places.device) <= places.repeat_interleave(gamma)[:, None]
    own = torch.block_diag(*[torch.ones(gamma, gamma).tril()] * count).bool().to(places.device)
    output = streams(
        states.flatten(1, 2), positions.expand(num_rows, -1), attention_mask=torch.cat([seen, own], dim=1)[None, None],
        cache=batch.keys, use_cache=True,
    )  # fmt: skip
    return output.unflatten(1, (count, gamma))


def compared_laws(
    streams: Streams, batch: StreamBatch, places: torch.Tensor, stream: int, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] of stream 0 .. gamma - 1 at the places that count, and the target's so many places later."""
    counts = batch.counts[:, places, stream]
    return streams.logits(states[:, :, stream][counts]), wanted_logits(streams, batch, places, stream)


@torch.no_grad()
def wanted_logits(streams: Streams, batch: StreamBatch, places: torch.Tensor, stream: int) -> torch.Tensor:
    """The target's own [n, V] that a stream of the places that count is to foresee."""
    later = (places + 1 + stream).clamp(max=batch.features.shape[1] - 1)
    return streams.logits(batch.features[:, later][batch.counts[:, places, stream]])


def stream_loss(streams: Streams, batch: StreamBatch) -> tuple[torch.Tensor, float]:
    """(mean cross-entropy of all streams, share of equal best tokens of the first) at half of the places or fewer."""
    num_rows, length = batch.hidden.shape[:2]
    most = len(places_for_laws(num_rows * length * streams.num_streams, streams.config.vocab_size))
    count = min(round(SHARE * length), most // (num_rows * streams.num_streams))
    places = torch.randperm(length)[: max(count, 1)].sort().values.to(batch.hidden.device)
    total, agreement = 0.0, 0.0
    with torch.autocast(batch.hidden.device.type, dtype=torch.bfloat16):
        states = stream_states(streams, batch, places)
        for stream in range(streams.num_streams):
            logits, wanted = compared_laws(streams, batch, places, stream, states)
            if len(logits):
                total = total + torch.nn.functional.cross_entropy(logits, wanted.softmax(dim=-1))
            if stream == 0 and len(logits):
                agreement = (logits.argmax(dim=-1) == wanted.argmax(dim=-1)).float().mean().item()
    return total / streams.num_streams + 0.0 * states.sum(), agreement


@torch.no_grad()
def agreement_on(streams: Streams, target: PreTrainedModel, generations: list[Generation]) -> list[float]:
    """Per stream the share of places where it and the target, so many places later, hold the same token the best."""
    same, count = [0] * streams.num_streams, [0] * streams.num_streams
    for part in shuffled_batches(generations, tokens_per_batch=4096, seed="agreement"):
        batch = stream_batch(streams, target, part)
        places = torch.arange(batch.hidden.shape[1], device=target.device)
        states = stream_states(streams, batch, places)
        for stream in range(streams.num_streams):
            counted = batch.counts[:, places, stream]
            guessed = streams.best_tokens(states[:, :, stream][counted], temperature=1.0, count=1)[0][:, 0]
            same[stream] += int((guessed == wanted_logits(streams, batch, places, stream).argmax(dim=-1)).sum())
            count[stream] += len(guessed)
    return [round(one / max(of, 1), 4) for one, of in zip(same, count, strict=True)]


RECIPE = Recipe(
    "streams",
    "lift.weight",
    lambda target, options, generations: Streams(
        target, num_streams=options.streams, num_layers=options.layers, rank=options.rank
    ),
    Streams.load,
    stream_batch,
    stream_loss,
    agreement_on,
)  # fmt: skip
