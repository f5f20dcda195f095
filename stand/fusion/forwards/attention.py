"""The forward of an attention module over a cache with slots: one product, one kernel, the attention, one product."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stand.forward.cache.cache_argument import cache_argument
from stand.fusion.formulas import HALVES, NO_NORM, ONE_PLUS
from stand.fusion.forwards.merged_linear import MergedLinear
from stand.fusion.forwards.norm import norm_epsilon
from stand.fusion.kernels import Kernels


@dataclass(frozen=True)
class AttentionSettings:
    """What is learned from the module's own forward.

    constants: keyword arguments that the module adds when it calls the attention function; a value that is one of its
    parameters is given by that parameter's name in `parameters` instead.
    rotary: leading components of a head that turn, 0 for a layer without positions.
    rule: how q_norm and k_norm scale, or NO_NORM.
    is_gated: behind every head's query q_proj has as many gates, whose sigmoid scales what the head mixes.
    pairing: which components turn together, one of `formulas.PAIRINGS`.
    """

    constants: Mapping[str, object]
    parameters: Mapping[str, str]
    rotary: int
    rule: int = NO_NORM
    is_gated: bool = False
    pairing: int = HALVES


class FusedAttention:
    """Stands for `module.forward` wherever the cache has `slots`; any other cache gets the module's own forward.

    The cache is written by the kernel, never through `update`; it must offer `slots` [M] int64,
    `layer(layer_idx) -> (keys, values)` [R, Hkv, S, D], and as `seen(layer_idx)` what `update` hands the attention
    function. `merged` is q_proj, k_proj and v_proj in one, None where they could not be merged or are one already
    (qkv_proj).
    """

    def __init__(
        self, module: nn.Module, settings: AttentionSettings, kernels: Kernels, *, merged: MergedLinear | None
    ):
        self.module = module
        self.kernels = kernels
        self.settings = settings
        self.merged = merged
        self.direct = kernels.direct_layers(module)
        self._neutral: torch.Tensor | None = None  # weight of a norm of values that has none
        if settings.rule != NO_NORM and hasattr(module, "v_norm"):
            self._neutral = torch.full_like(module.k_norm.weight, 0.0 if settings.rule == ONE_PLUS else 1.0)
        self.own = frozenset(inspect.signature(type(module).forward).parameters)
        self.cache_argument = cache_argument(module)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache = kwargs.get(self.cache_argument)
        if getattr(cache, "slots", None) is None or hidden_states.shape[0] != 1:
            named = {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
            return type(self.module).forward(self.module, hidden_states=hidden_states, **named, **kwargs)
        keys, values = cache.layer(self.module.layer_idx)
        query, gates = self._rotated(hidden_states, position_embeddings, keys, values, cache.slots)
        keys, values = cache.seen(self.module.layer_idx)
        if stores_for_others(self.module):
            kwargs["shared_kv_states"][self.module.layer_type] = keys, values
        attend = ALL_ATTENTION_FUNCTIONS[self.module.config._attn_implementation]
        passed = {name: value for name, value in kwargs.items() if name not in self.own}
        mixed, weights = attend(self.module, query, keys, values, attention_mask, **self._constants(), **passed)
        mixed = mixed if gates is None else mixed.reshape(gates.shape) * torch.sigmoid(gates)
        return self._linear("o_proj", mixed.reshape(1, hidden_states.shape[1], -1)), weights

    def _rotated(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write the tokens' keys and values; the query [1, H, M, D], and gates [M, H, D]."""
        module, rule, gates = self.module, self.settings.rule, None
        num_tokens, head_size = hidden_states.shape[1], module.head_dim
        asked, *stored = self._projected(hidden_states)
        if self.settings.is_gated:
            asked, gates = asked.view(num_tokens, -1, 2 * head_size).chunk(2, dim=-1)
            asked = asked.clone(memory_format=torch.contiguous_format)
        parts = [part.view(num_tokens, -1, head_size) for part in (asked, *stored)]
        cos, sin = (_with_adjacent_columns(table[0]) for table in position_embeddings)
        weights, epsilon, of_values = (None, None), 0.0, None
        if rule != NO_NORM:
            weights, epsilon = (module.q_norm.weight, module.k_norm.weight), norm_epsilon(module.q_norm)
            of_values = self._value_weight()
        pairing = () if self.settings.pairing == HALVES else (self.settings.pairing,)
        query = self.kernels.rope_and_store(
            *parts, cos, sin, keys, values, slots, self.settings.rotary, *weights, epsilon, rule, of_values, *pairing
        )
        return query.transpose(0, 1).unsqueeze(0), gates

    def _value_weight(self) -> torch.Tensor | None:
        """Of the norm of values, where there is one; of one without a weight what changes nothing."""
        weight = getattr(getattr(self.module, "v_norm", None), "weight", None)
        return self._neutral if weight is None else weight

    def _projected(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.merged is not None:
            return self.merged.split(hidden_states)
        module = self.module
        if getattr(module, "v_proj", None) is None and hasattr(module, "k_proj"):  # values are keys before their norm
            query, key = self.kernels.linears(module, ("q_proj", "k_proj"), hidden_states, self.direct)
            return query, key, key
        if hasattr(module, "qkv_proj"):
            sizes = [heads * module.head_dim for heads in _head_counts(module.config)]
            return self._linear("qkv_proj", hidden_states).split(sizes, dim=-1)
        return self.kernels.linears(module, ("q_proj", "k_proj", "v_proj"), hidden_states, self.direct)

    def _linear(self, name: str, states: torch.Tensor) -> torch.Tensor:
        return self.kernels.linear(self.module, name, states, self.direct)

    def _constants(self) -> dict[str, object]:
        named = {name: getattr(self.module, parameter) for name, parameter in self.settings.parameters.items()}
        return {**self.settings.constants, **named}


def _with_adjacent_columns(table: torch.Tensor) -> torch.Tensor:
    """Kernels read rows; tables may come transposed, as those of GPT-OSS do under transformers 5.17."""
    return table if table.stride(-1) == 1 else table.contiguous()


def is_attention(module: nn.Module) -> bool:
    """Whether the module has the parts of an attention with rotary positions, by their usual names."""
    children = dict(module.named_children())
    has_values = "v_proj" in children or (hasattr(module, "v_proj") and "v_norm" in children)
    has_inputs = ({"q_proj", "k_proj"} <= children.keys() and has_values) or "qkv_proj" in children
    return has_inputs and "o_proj" in children and all(hasattr(module, n) for n in ("layer_idx", "head_dim", "config"))


def may_be_gated(module: nn.Module) -> bool:
    """Whether its queries come twice as wide as what its heads mix."""
    query, output = getattr(module, "q_proj", None), module.o_proj
    return isinstance(query, nn.Linear) and query.out_features == 2 * output.in_features


def reuses_keys(module: nn.Module) -> bool:
    """Whether its keys are another layer's (Gemma 3n, Gemma 4 E2B)."""
    return getattr(module, "is_kv_shared_layer", False)


def stores_for_others(module: nn.Module) -> bool:
    """Whether layers behind it reuse its keys."""
    return getattr(module, "store_full_length_kv", False)


def has_head_norms(module: nn.Module) -> bool:
    """Whether queries and keys are normed before they turn."""
    return hasattr(module, "q_norm") and hasattr(module, "k_norm")


def head_norms(module: nn.Module) -> tuple[str, ...]:
    """The names of those that it has, of values too."""
    return tuple(name for name in ("q_norm", "k_norm", "v_norm") if hasattr(module, name))


def _head_counts(config: object) -> tuple[int, int, int]:
    return config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
