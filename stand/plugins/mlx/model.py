"""A model of mlx-lm as transformers' settings and the engine's steps see one."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache
from transformers import PreTrainedConfig

from stand.forward.cache.key_shape import LayerKeys, remember_layers
from stand.forward.packed_plan import StepPlan
from stand.forward.self_check import UnsupportedModelError
from stand.plugins.foreign.model import ForeignModel
from stand.plugins.mlx.attention import send_attention
from stand.plugins.mlx.cache import RoomCache
from stand.plugins.mlx.recurrent import send_states

TYPES = {mx.float32: torch.float32, mx.float16: torch.float16, mx.bfloat16: torch.bfloat16}
FEW = 5  # numbers of a weight that tell it from another one


class MlxConfig(PreTrainedConfig):
    """Sizes that a model of mlx-lm was seen to have."""

    model_type = "mlx"


class MlxModel(ForeignModel):
    """The weights are `inner`'s, a model of mlx-lm's; the cache is a `RoomCache`."""

    config_class = MlxConfig

    def __init__(self, inner: nn.Module, end_ids: Sequence[int]):
        """Runs one token. Raises UnsupportedModelError for layers that keep other things than keys and values, and
        what the model raises."""
        kinds = _kinds(inner)
        send_attention(inner)
        send_states(inner)
        cache = RoomCache(inner, kinds, 1, 1)
        plan = StepPlan.for_prompt(np.zeros(1, dtype=np.int32), 0, row=0)
        cache.begin(plan)
        logits = cache.run(plan, 1)
        super().__init__(
            _config_of(inner, cache, logits.shape[1]),
            dtype=TYPES[cache.keys[0].dtype],
            num_bytes=sum(weight.nbytes for _, weight in tree_flatten(inner.parameters())),
            end_ids=end_ids,
        )
        self.inner = inner
        self._kinds = kinds
        remember_layers(self, [
            LayerKeys(keys.shape[1], keys.shape[3], values.shape[3])
            for keys, values in zip(cache.keys, cache.values, strict=True)
        ], row_bytes=cache.recurrent.row_bytes)  # fmt: skip

    @property
    def way(self) -> str:
        return f"mlx {mx.__version__} {mx.device_info().get('device_name', mx.default_device())}"

    def new_cache(self, num_rows: int = 1, room: int = 1) -> RoomCache:
        return RoomCache(self.inner, self._kinds, num_rows, room)

    def free_bytes(self) -> float:
        """Of what Metal recommends; beyond that an Apple chip's GPU fails, or the system swaps."""
        recommended = mx.device_info().get("max_recommended_working_set_size", math.inf)
        return max(recommended - mx.get_active_memory(), 0.0)

    def refuse_unready(self) -> None:
        if any(
            isinstance(module, nn.Dropout) and module.training and module._p_1 < 1 for module in self.inner.modules()
        ):
            raise UnsupportedModelError(
                "the model must be in evaluation mode, got training mode with dropout; call model.eval()"
            )

    def seen_weights(self) -> bytes:
        weights = [weight.reshape(-1) for _, weight in tree_flatten(self.inner.parameters()) if weight.size]
        few = [weight[:: max(len(weight) // FEW, 1)] for weight in weights]
        return np.array(mx.concatenate([numbers.astype(mx.float32) for numbers in few])).tobytes()


def _config_of(inner: nn.Module, cache: RoomCache, vocabulary_size: int) -> MlxConfig:
    heads, size = cache.keys[0].shape[1::2]
    return MlxConfig(
        vocab_size=vocabulary_size,
        hidden_size=_told(inner, "hidden_size") or heads * size,
        num_hidden_layers=len(cache.keys),
        max_position_embeddings=_told(inner, "max_position_embeddings") or sys.maxsize,
    )


def _told(inner: nn.Module, name: str) -> int | None:
    """A number of the model's arguments, or of its text model's."""
    arguments = getattr(inner, "args", None)
    texts = getattr(arguments, "text_config", None) or {}
    of_texts = texts.get(name) if isinstance(texts, dict) else getattr(texts, name, None)
    return getattr(arguments, name, None) or of_texts


def _kinds(inner: nn.Module) -> list[object]:
    """What its layers keep: the caches that the model makes for them."""
    kinds = make_prompt_cache(inner)
    for kind in kinds:
        _refuse_others(kind)
    return kinds


def _refuse_others(kind: object) -> None:
    if isinstance(kind, CacheList):
        for part in kind.caches:
            _refuse_others(part)
    elif not (type(kind) in (KVCache, ArraysCache) or type(kind) is RotatingKVCache and kind.keep == 0):
        raise UnsupportedModelError(
            f"every layer must keep keys and values, or a state, got a {type(kind).__name__}; load the model's "
            "transformers class and call stand.wrap"
        )
