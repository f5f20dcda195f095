"""The trained part of Speculative Streaming (arXiv 2402.11131) beside a frozen target.

At a token t stream j = 1 .. gamma guesses the token j + 1 places on. It begins, at the input of one of the target's
upper layers, as S_j = f(M_t) + P_j (equation 3): M_t is the target's own hidden state there, f a linear layer, P_j the
embedding of the stream. From there it goes through the target's own layers with low-rank adapters, and sees the keys
of all tokens up to t and of streams 1 .. j (equation 2). The target never sees a stream, and no adapter sees a token
of the target: the paper tunes the target as well, this form leaves its outputs as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from stand.drafters.heads.trained_part import FAMILIES, VOCABULARY, WEIGHT_FILE, TrainedPart, read_tensors
from stand.drafters.settings import check_count
from stand.forward.cache.cache_argument import cache_argument
from stand.forward.model import moving_ropes, text_config
from stand.forward.tree_attention import ATTENTION_NAME

PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


class LowRank(nn.Module):
    """x -> B A x (LoRA, arXiv 2106.09685); B is zero at first."""

    def __init__(self, size_in: int, size_out: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, size_in) / size_in**0.5)
        self.up = nn.Parameter(torch.zeros(size_out, rank))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(nn.functional.linear(states, self.down), self.up)


class AdaptedLinear(nn.Module):
    """The target's own linear layer, shared and frozen, plus an adapter."""

    def __init__(self, linear: nn.Linear, adapter: LowRank) -> None:
        super().__init__()
        self._linear = (linear,)  # in a tuple: no parameter of the streams
        self.adapter = adapter

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self._linear[0](states) + self.adapter(states)


class Streams(TrainedPart):
    """gamma streams through the target's upper layers. Final norm and LM head are the target's.

    num_streams: gamma. num_layers: of the target's, from the top. rank: of all adapters.

    Raises ValueError for a target of another family than Llama or Qwen2, with sliding windows, with rotary frequencies
    that follow the length, or with fewer layers, and for sizes below 1.
    """

    def __init__(self, target: PreTrainedModel, *, num_streams: int = 3, num_layers: int = 2, rank: int = 32) -> None:
        super().__init__(target)
        for name, value, usual in (("num_streams", num_streams, 3), ("num_layers", num_layers, 2), ("rank", rank, 32)):
            check_count(name, value, 1, usual=f"{usual} is usual")
        _check_target(target, num_layers)
        decoder = target.get_decoder()
        self.config = copy.deepcopy(text_config(target))
        self.config._attn_implementation = ATTENTION_NAME
        self.num_streams = num_streams
        self.first_layer = len(decoder.layers) - num_layers
        size = self.config.hidden_size
        self.lift = nn.Linear(size, size)
        nn.init.eye_(self.lift.weight)
        nn.init.zeros_(self.lift.bias)
        self.embeddings = nn.Parameter(0.02 * torch.randn(num_streams, size))
        self.adapters = nn.ModuleList([_adapters(layer, rank) for layer in decoder.layers[self.first_layer :]])
        # In a tuple, so that the target's parameters are not the streams'.
        self._layers = tuple(
            _adapted(layer, adapters, self.config)
            for layer, adapters in zip(decoder.layers[self.first_layer :], self.adapters, strict=True)
        )
        self.to(target.device, target.dtype)

    @classmethod
    def load(cls, target: PreTrainedModel, path: str | PathLike) -> Streams:
        """Read what `save` has written: a folder, or its file. Sizes follow from the tensors.

        Raises ValueError where names or shapes do not belong to streams of this target.
        """
        tensors = read_tensors(Path(path), (WEIGHT_FILE,))
        vocabulary = tensors.pop(VOCABULARY, None)
        adapters = {name for name in tensors if name.startswith("adapters.")}
        layers = {name.split(".")[1] for name in adapters}
        downs = [tensors[name] for name in adapters if name.endswith(".down")]
        embeddings = tensors.get("embeddings", torch.empty(()))
        are_sound = all(value.ndim == 2 and value.numel() for value in (embeddings, *downs))
        if not are_sound or len({len(value) for value in downs}) != 1:
            raise ValueError(
                "streams must hold embeddings [gamma, D] and adapters of one rank, got "
                f"{', '.join(sorted(tensors)[:4]) or 'nothing'}; write them with Streams.save or train_streams.py"
            )
        streams = cls(target, num_streams=len(embeddings), num_layers=len(layers), rank=len(downs.pop()))
        streams._take(tensors)
        if vocabulary is not None:
            streams.restrict(vocabulary)
        return streams.eval()

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """What streams start as [..., gamma, D], from hidden states [..., D] of the target before `first_layer`."""
        return self.lift(hidden)[..., None, :] + self.embeddings

    def forward(
        self,
        states: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        attention: str | None = None,
        cache: object = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """States [B, G, D] through the layers and the final norm: [B, G, D], as the LM head takes them.

        position_ids [B, G]: stream j of a token is j places behind it. attention: from now on, a name that transformers
        knows. cache: holds the target's keys and takes the streams' behind them. kwargs go to the layers: they say who
        sees whom.
        """
        if attention is not None:
            self.config._attn_implementation = attention
        decoder = self._model[0].get_decoder()
        angles = decoder.rotary_emb(states, position_ids=position_ids)
        kwargs[cache_argument(self._layers[0])] = cache
        for layer in self._layers:
            states = layer(states, position_embeddings=angles, position_ids=position_ids, **kwargs)
        return decoder.norm(states)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., V]: the target's LM head."""
        return self._model[0].get_output_embeddings()(states)

    def layers_of_a_run(self) -> Sequence[nn.Module]:
        return self._model[0].get_decoder().layers[self.first_layer :]

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        own = {name: tuple(value.shape) for name, value in self.state_dict().items()}
        got = {name: tuple(value.shape) for name, value in tensors.items()}
        wrong = sorted(name for name in own.keys() | got.keys() if own.get(name) != got.get(name))
        if wrong:
            name = wrong[0]
            raise ValueError(
                f"{name} must be {_shape(own.get(name))} for this target, got {_shape(got.get(name))}; take the "
                "streams that were trained for this model"
            )
        self.load_state_dict(tensors)


def _check_target(target: PreTrainedModel, num_layers: int) -> None:
    config, remedy = text_config(target), "draft for it with stand.BlendedDrafter"
    if config.model_type not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise ValueError(f"streams need a target of the families {families}, got {config.model_type!r}; {remedy}")
    layers = target.get_decoder().layers
    if any(getattr(layer.self_attn, "sliding_window", None) is not None for layer in layers):
        raise ValueError(f"streams need a target that attends to all tokens, got sliding windows; {remedy}")
    if moving_ropes(target):  # a position may change the target's outputs
        kinds = ", ".join(moving_ropes(target))
        raise ValueError(f"streams need rotary frequencies that never change, got kind {kinds!r}; {remedy}")
    if num_layers > len(layers):
        raise ValueError(f"num_layers must be in [1, {len(layers)}], got {num_layers}; half of the layers are usual")


def _adapters(layer: nn.Module, rank: int) -> nn.ModuleDict:
    found = nn.ModuleDict()
    for part, names in PROJECTIONS.items():
        for name in names:
            linear = getattr(getattr(layer, part), name)
            found[name] = LowRank(linear.in_features, linear.out_features, rank)
    return found


def _adapted(layer: nn.Module, adapters: nn.ModuleDict, config: object) -> nn.Module:
    """A layer that shares all parameters with `layer`, with an adapter beside every projection."""
    shared = {id(parameter): parameter for parameter in layer.parameters()} | {id(layer.self_attn.config): config}
    twin = copy.deepcopy(layer, shared)
    for part, names in PROJECTIONS.items():
        for name in names:
            linear = getattr(getattr(layer, part), name)
            setattr(getattr(twin, part), name, AdaptedLinear(linear, adapters[name]))
    return twin


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
