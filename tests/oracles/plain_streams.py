"""Streams without packing, masks or adapters beside a layer: plain layers with merged weights, one token at a time."""

import copy

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.drafters.streams.weights import PROJECTIONS, Streams
from stand.forward.cache.cache_argument import cache_argument
from stand.forward.tree_attention import tree_attention


def random_streams(target: PreTrainedModel, *, seed: int = 0, scale: float = 0.3, **sizes: int) -> Streams:
    """Untrained streams whose adapters do something; sizes as `Streams` takes them."""
    torch.manual_seed(seed)
    streams = Streams(target, **{"num_layers": 2, "rank": 4, **sizes})
    with torch.no_grad():
        for name, parameter in streams.named_parameters():
            parameter.add_(scale * torch.randn_like(parameter) * (1.0 if name.endswith("up") else 0.2))
    return streams.eval()


@torch.inference_mode()
def plain_stream_logits(streams: Streams, target: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """[gamma, V]: the logits of the streams of the last one of `tokens`."""
    with tree_attention(target, "sdpa"):  # plain attention, also in the middle of a call
        output = target(torch.tensor([tokens]), use_cache=True, output_hidden_states=True)
        keys, decoder = output[cache_argument(target)], target.get_decoder()
        lifted = streams.lift(output.hidden_states[streams.first_layer][0, -1])
        begins = torch.stack([lifted + embedding for embedding in streams.embeddings])
        logits = []
        for stream, state in enumerate(begins[:, None, None]):
            angles = decoder.rotary_emb(state, position_ids=torch.tensor([[len(tokens) + stream]]))
            for place, adapters in enumerate(streams.adapters, start=streams.first_layer):
                layer = merged(decoder.layers[place], adapters)
                given = {"attention_mask": None, cache_argument(layer): keys}
                state = layer(state, position_embeddings=angles, **given)
            logits.append(target.lm_head(decoder.norm(state))[0, 0])
    return torch.stack(logits).numpy()


def merged(layer: torch.nn.Module, adapters: torch.nn.ModuleDict) -> torch.nn.Module:
    layer = copy.deepcopy(layer)
    for part, names in PROJECTIONS.items():
        for name in names:
            getattr(getattr(layer, part), name).weight.data += adapters[name].up @ adapters[name].down
    return layer
