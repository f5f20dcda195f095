"""Attention of packed tokens over rooms of keys, in the place of the function that mlx-lm's models call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx_lm.models import base

from stand.forward.packed_plan import StepPlan

NAME = "scaled_dot_product_attention"  # in the modules of mlx-lm's models
CAUSAL = "causal"  # of MLX: the last query sees all keys


class PackedStep:
    """What all layers of a forward share: where tokens write and what they see, as arrays of MLX."""

    def __init__(self, plan: StepPlan):
        self.plan = plan
        self.positions = mx.array(plan.position_ids[0].numpy().astype(np.int32))  # [M]
        self.rows = mx.array(plan.cache_rows.numpy().astype(np.int32))  # [M], like `slots`
        self.slots = mx.array(plan.cache_slots.numpy().astype(np.int32))
        self._masks: dict[int | None, mx.array | str | None] = {}
        self._is_uniform = plan.num_tokens == plan.num_rows * plan.longest

    @cached_property
    def _padding(self) -> mx.array:
        """[A * T]: the packed token of every padded place, the first one where there is none."""
        tokens = np.zeros(self.plan.num_rows * self.plan.longest, dtype=np.int32)
        tokens[self.plan.row_places.numpy()] = np.arange(self.plan.num_tokens)
        return mx.array(tokens)

    @cached_property
    def _places(self) -> mx.array:
        """[M]: the padded place of every packed token."""
        return mx.array(self.plan.row_places.numpy().astype(np.int32))

    def pad(self, packed: mx.array) -> mx.array:
        """[M, H, 1, D] -> [A, H, T, D]."""
        packed = packed[:, :, 0]
        if not self._is_uniform:
            packed = packed[self._padding]
        return packed.reshape(self.plan.num_rows, self.plan.longest, *packed.shape[1:]).transpose(0, 2, 1, 3)

    def unpad(self, padded: mx.array) -> mx.array:
        """[A, H, T, D] -> [M, H, 1, D]."""
        flat = padded.transpose(0, 2, 1, 3).flatten(0, 1)
        return (flat if self._is_uniform else flat[self._places])[:, :, None]

    def mask(self, window: int | None) -> mx.array | str | None:
        """[A, 1, T, L] bool, or as MLX abbreviates it. window: as in `StepPlan.visible`."""
        if window not in self._masks:
            self._masks[window] = self._new_mask(window)
        return self._masks[window]

    def _new_mask(self, window: int | None) -> mx.array | str | None:
        plan = self.plan
        if plan.is_prompt and (window is None or plan.kv_length <= window):
            return CAUSAL
        visible = plan.visible(window)
        if visible.all():
            return None
        return mx.array(plan.pad_rows(torch.from_numpy(visible)).numpy())[:, None]


@dataclass(frozen=True, slots=True)
class WindowMask:
    """What a model gets for a mask and hands on to attention. window: tokens, the newest included; None: all."""

    window: int | None


class SeenKeys:
    """What a layer gets for the keys and the values that it has handed over: attention alone can use it."""

    def __init__(self, keys: mx.array, values: mx.array, step: PackedStep, window: int | None):
        """keys, values: [A, Hkv, L, D], of the plan's rows. window: as the layer's own cache has it."""
        self.dtype = values.dtype
        self._keys, self._values, self._step, self._window = keys, values, step, window

    def attend(self, queries: mx.array, *, scale: float, mask: object, sinks: mx.array | None) -> mx.array:
        """[M, H, 1, D] -> [M, H, 1, Dv]."""
        step = self._step
        seen = step.mask(self._agreed_window(mask))
        padded = mx.fast.scaled_dot_product_attention(
            step.pad(queries), self._keys, self._values, scale=scale, mask=seen, sinks=sinks
        )
        return step.unpad(padded)

    def _agreed_window(self, mask: object) -> int | None:
        if mask is None:
            return self._window
        if not isinstance(mask, WindowMask):
            raise ValueError(
                f"a layer must take its mask from a cache, got one of its own ({type(mask).__name__}); this model "
                "cannot be served"
            )
        if self._window not in (None, mask.window):
            raise ValueError(
                f"a layer's cache must keep the window of its mask, got {self._window} and {mask.window} tokens; this "
                "model cannot be served"
            )
        return mask.window


def send_attention(model: nn.Module) -> None:
    """From now on the modules of the model send attention to `SeenKeys` where they get them; else all is as before."""
    for module in model.modules():
        names = getattr(type(module).__call__, "__globals__", {})
        if names.get(NAME) is base.scaled_dot_product_attention:
            names[NAME] = _sending(base.scaled_dot_product_attention)


def _sending(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @wraps(attention)
    def scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks=None):
        if isinstance(keys, SeenKeys):
            return keys.attend(queries, scale=scale, mask=mask, sinks=sinks)
        return attention(queries, keys, values, cache, scale, mask, sinks)

    return scaled_dot_product_attention
