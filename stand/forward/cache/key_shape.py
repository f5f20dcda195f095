"""What a model keeps per token: heads and bytes of its keys and values, as its layers have stored them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from stand.forward.attention_shape import AttentionShape, HeadSizes
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.model import text_config
from stand.forward.recurrent.states import RecurrentStates


@dataclass(frozen=True, slots=True)
class LayerKeys:
    """What a layer keeps of a token: heads, and the numbers of a head's key and of its value."""

    num_heads: int
    key_size: int
    value_size: int

    @property
    def count(self) -> int:
        """Numbers of a token's key and value, all heads together."""
        return self.num_heads * (self.key_size + self.value_size)


@dataclass(frozen=True, slots=True)
class KeyShape:
    """layers: those that keep keys, by their indices in the order of a forward, and what each keeps. head_bytes: of one
    slot of a head; where layers, or keys and values, differ, what all of them are multiples of. token_bytes: of one
    token in all layers. row_bytes: of the recurrent states of one row, however long it is. attentions: the kinds of
    layers. shares: of a token's bytes, by device; none where they were not seen."""

    layers: tuple[tuple[int, LayerKeys], ...]
    head_bytes: int
    token_bytes: int
    attentions: tuple[AttentionShape, ...]
    row_bytes: int = 0
    shares: tuple[tuple[torch.device, float], ...] = field(default=(), compare=False)

    @property
    def num_layers(self) -> int:
        """That keep keys."""
        return len(self.layers)

    @property
    def are_expanded(self) -> bool:
        """Whether attention gets other keys than a layer keeps, which it computes from these anew in every forward."""
        kept = {(keys.num_heads, keys.key_size, keys.value_size) for _, keys in self.layers}
        return any((shape.key_heads, shape.sizes.key, shape.sizes.value) not in kept for shape in self.attentions)

    @property
    def num_heads(self) -> int:
        """The most key heads of a layer."""
        return max(keys.num_heads for _, keys in self.layers)


_STORED: WeakKeyDictionary[PreTrainedModel, tuple[KeyShape, torch.dtype]] = WeakKeyDictionary()
_STATES: WeakKeyDictionary[PreTrainedModel, RecurrentStates] = WeakKeyDictionary()  # of no rows


def key_shape(model: PreTrainedModel) -> KeyShape:
    """As `remember` has seen it, in the model's dtype of today, else by the model's configuration."""
    if model not in _STORED:
        return _configured(model)
    shape, dtype = _STORED[model]
    if dtype is model.dtype:
        return shape
    old, new = dtype.itemsize, model.dtype.itemsize
    return replace(
        shape,
        head_bytes=shape.head_bytes * new // old,
        token_bytes=shape.token_bytes * new // old,
        row_bytes=_STATES[model].row_bytes_in(model.dtype),
    )


def layer_keys(cache: TreeCache) -> tuple[tuple[int, LayerKeys], ...]:
    """What the layers have stored in `cache`, as in `KeyShape.layers`."""
    return tuple(
        (index, LayerKeys(keys.shape[1], keys.shape[3], values.shape[3]))
        for index, keys, values in zip(cache.layer_places, cache.keys, cache.values, strict=True)
    )


def remember(model: PreTrainedModel, cache: TreeCache, attentions: Iterable[AttentionShape]) -> None:
    """`cache` holds what a forward of `model` has stored, whose layers attended in these shapes."""
    stored = [*cache.keys, *cache.values]
    sizes = [(tensor.shape[1], tensor.shape[3] * tensor.element_size()) for tensor in stored]
    by_device: dict[torch.device, int] = {}
    for tensor, (heads, head_bytes) in zip(stored, sizes, strict=True):
        by_device[tensor.device] = by_device.get(tensor.device, 0) + heads * head_bytes
    token_bytes = sum(by_device.values())
    shape = KeyShape(
        layers=layer_keys(cache),
        head_bytes=math.gcd(*(head_bytes for _, head_bytes in sizes)),
        token_bytes=token_bytes,
        attentions=tuple(attentions),
        row_bytes=cache.recurrent.row_bytes,
        shares=tuple((device, num_bytes / token_bytes) for device, num_bytes in by_device.items()),
    )
    _STORED[model] = shape, model.dtype
    _STATES[model] = cache.recurrent.like(0)


def remember_layers(model: PreTrainedModel, layers: Sequence[LayerKeys], *, row_bytes: int = 0) -> None:
    """What each layer keeps of a model that another library runs, in the model's dtype. row_bytes: as in `KeyShape`."""
    itemsize = model.dtype.itemsize
    shape = KeyShape(
        layers=tuple(enumerate(layers)),
        head_bytes=math.gcd(*(size for keys in layers for size in (keys.key_size, keys.value_size))) * itemsize,
        token_bytes=sum(keys.count for keys in layers) * itemsize,
        attentions=(),
        row_bytes=row_bytes,
    )
    _STORED[model] = shape, model.dtype


def new_states(model: PreTrainedModel, num_rows: int) -> RecurrentStates:
    """Of so many rows that have seen no token, in the model's dtype and on its device of today; without layers where
    `remember` has seen none."""
    known = _STATES.get(model)
    return RecurrentStates(num_rows) if known is None else known.like(num_rows, dtype=model.dtype, device=model.device)


def layer_windows(model: PreTrainedModel) -> list[int]:
    """Of each layer by its configuration: tokens, 0 where the whole text is seen."""
    return [_window(own, index) for index, own in enumerate(_layer_configs(text_config(model)))]


def _window(own: PreTrainedConfig, index: int) -> int:
    """own: of this layer."""
    kinds = getattr(own, "layer_types", None)
    is_windowed = kinds is None or kinds[index] == "sliding_attention"
    return (getattr(own, "sliding_window", None) or 0) if is_windowed else 0


def _configured(model: PreTrainedModel) -> KeyShape:
    config = text_config(model)
    layers, attentions = [], {}
    for index, own in enumerate(_layer_configs(config)):
        heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
        size = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        layers.append((index, LayerKeys(heads, size, size)))
        shape = AttentionShape(own.num_attention_heads, heads, HeadSizes.alike(size), _window(own, index))
        attentions[shape] = None
    itemsize = model.dtype.itemsize
    head_bytes = math.gcd(*(keys.key_size for _, keys in layers)) * itemsize
    token_bytes = sum(keys.count * itemsize for _, keys in layers)
    return KeyShape(tuple(layers), head_bytes, token_bytes, tuple(attentions))


def _layer_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Of each layer: newer versions of transformers have layers of different sizes in one configuration."""
    own = getattr(config, "per_layer_config", None)
    return [config if own is None else own[index] for index in range(config.num_hidden_layers)]
