"""What a captured step costs on a GPU where nobody has timed one, computed from the model's sizes.

A step reads the weights and its rows' keys. Each further tile of attention that a row's tokens fill reads the row's
keys again, and each further token makes the products a little longer. The constants are those of an H100 with
Qwen2.5-7B in bfloat16 (docs/figures/gpu_h100.json). Of Llama-3.1-8B, which they were not taken from, the computed
times are 0.93 to 1.04 of the measured ones, and drafts go by ratios of times (docs/gpu.md, "How much is drafted").
Other GPUs were not timed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from stand.drafters.costs.step_cost import StepCost
from stand.forward.cache.key_shape import KeyShape, key_shape, layer_windows
from stand.forward.devices import input_device, is_nvidia
from stand.forward.model import text_config

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 256)  # tokens; a larger step was not timed
BYTES_PER_SECOND = 2.45e12
STEP_BYTES, ROW_BYTES = 1.25e9, 75e6  # what might be read meanwhile: host and launches, and what is done for a row
KEY_SHARE = 0.9  # attention reads faster than small products
TILE_SHARE = 0.82  # of a tile's time in that of the first one, which reads the keys from memory
TILE_QUERIES = 128
TOKEN_RISE, LATE_RISE, LATE = 1 / 800, 1 / 2200, 128  # of the weights' time, per token; and beyond so many tokens
BUSY_SHARE = 0.95  # of the products' time in that of the weights, with as many tokens as below

# Tokens whose products of weights take as long as reading the weights, by the specifications of the GPU of each
# capability with the fewest (A100, H200, B200); of others those of an RTX 5090.
RIDGES = {(8, 0): 150, (9, 0): 206, (10, 0): 280}
LEAST_RIDGE = 117


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """weights: bytes that a step reads. layers: per layer bytes of a token's keys and values, and the window, 0 where
    there is none. groups: query heads that share a key head."""

    weights: int
    layers: tuple[tuple[float, int], ...]
    groups: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelSizes:
        shape = key_shape(model)
        itemsize = shape.token_bytes / sum(keys.count for _, keys in shape.layers)
        return cls(
            weights=_weight_bytes(model),
            layers=tuple((count * itemsize, window) for count, window in _numbers_read(model, shape)),
            groups=max(attention.groups for attention in shape.attentions),
        )

    def key_bytes(self, length: float) -> float:
        """That a row of so many tokens has attention read."""
        return sum(size * (min(length, window) if window else length) for size, window in self.layers)


class AssumedCosts:
    """Looks like a `CostTable`: the costs of one model, for any number of rows, behind lengths of half octaves."""

    most_tokens = SIZES[-1]

    def __init__(self, sizes: ModelSizes, ridge: int):
        """ridge: see RIDGES."""
        self._sizes, self._ridge = sizes, ridge
        self._known: dict[tuple[int, int], StepCost] = {}

    @classmethod
    def of(cls, model: PreTrainedModel) -> AssumedCosts:
        return cls(ModelSizes.of(model), RIDGES.get(capability_of(model), LEAST_RIDGE))

    def at(self, length: float, *, num_rows: int = 1) -> StepCost:
        """Of a step of `num_rows` rows behind about so many tokens each."""
        key = num_rows, round(2 * math.log2(length + 1))
        if key not in self._known:
            self._known[key] = self._computed(num_rows, 2 ** (key[1] / 2))
        return self._known[key]

    def _computed(self, num_rows: int, length: float) -> StepCost:
        more = tuple(size for size in SIZES if size > num_rows)
        tokens = (num_rows, *more) if more else (num_rows - 1, num_rows)  # two sizes, and none that a draft would reach
        seconds = tuple(self._seconds(num_rows, length, count) for count in tokens)
        return StepCost(num_rows, round(length), tokens, seconds)

    def _seconds(self, num_rows: int, length: float, num_tokens: int) -> float:
        own = self._sizes.weights + STEP_BYTES
        longer = 1 + num_tokens * TOKEN_RISE + max(num_tokens - LATE, 0) * LATE_RISE
        products = own * max(longer, BUSY_SHARE * num_tokens / self._ridge)
        tiles = max(num_tokens / num_rows * self._sizes.groups / TILE_QUERIES, 1.0)
        keys = KEY_SHARE * self._sizes.key_bytes(length) * (1 + TILE_SHARE * (tiles - 1))
        return (products + num_rows * (ROW_BYTES + keys)) / BYTES_PER_SECOND


def has_captured_steps(model: PreTrainedModel) -> bool:
    """Whether its GPU is one that captured steps are for: of others these costs say nothing."""
    return is_nvidia(input_device(model)) and capability_of(model) >= min(RIDGES)


def capability_of(model: PreTrainedModel) -> tuple[int, int]:
    return torch.cuda.get_device_capability(input_device(model))


def _numbers_read(model: PreTrainedModel, shape: KeyShape) -> list[tuple[int, int]]:
    """(numbers of a token's key and value, window) of each layer with attention. One without keys of its own reads
    those of the last layer of its kind that has some (Gemma 3n, Gemma 4 E2B)."""
    kept, windows = dict(shape.layers), dict(enumerate(layer_windows(model)))
    num_reusing = getattr(text_config(model), "num_kv_shared_layers", None) or 0
    for index in range(len(windows) - num_reusing, len(windows)):
        if index not in kept:
            kept[index] = kept[max(other for other in kept if windows.get(other) == windows[index])]
    return [(keys.count, windows.get(index, 0)) for index, keys in kept.items()]


def _weight_bytes(model: PreTrainedModel) -> int:
    """Without tables of which a step reads a few rows, and without what only prompts need."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    decoder = model if decoder in (None, head) else decoder  # of a class that calls its head so
    tables = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    tables.add(id(model.get_input_embeddings().weight))
    kept = {id(weight): weight for weight in decoder.parameters() if id(weight) not in tables}
    kept |= {id(weight): weight for weight in (() if head is None else head.parameters())}  # it may be a table, too
    return sum(weight.numel() * weight.element_size() for weight in kept.values())
