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
        self._visible: dict[int | None, mx.array] = {}
        self._paths_back: dict[int, mx.array] = {}
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

    @cached_property
    def chain(self) -> mx.array:
        """[1, M]: a prompt's tokens."""
        return mx.arange(self.plan.num_tokens)[None]

    @cached_property
    def levels(self) -> list[tuple[mx.array, mx.array | None]]:
        """By depth the packed tokens [n, 1] and, below the roots, where their predecessors [n] are among those of the
        depth above."""
        plan, levels = self.plan, []
        predecessors = plan.paths_back(2)[:, 0].numpy() - plan.num_rows
        places = np.zeros(plan.num_tokens, dtype=np.int64)  # of a token among those of its depth
        for depth in range(int(plan.depths.max()) + 1):
            tokens = np.flatnonzero(plan.depths == depth)
            above = mx.array(places[predecessors[tokens]]) if depth > 0 else None
            levels.append((mx.array(tokens[:, None]), above))
            places[tokens] = np.arange(len(tokens))
        return levels

    @cached_property
    def from_levels(self) -> mx.array:
        """[M]: where the packed tokens are among those of all levels, one level after the other."""
        by_depth = np.argsort(self.plan.depths, kind="stable")
        return mx.array(np.argsort(by_depth))

    def paths_back(self, count: int) -> mx.array:
        """As the plan's."""
        if count not in self._paths_back:
            self._paths_back[count] = mx.array(self.plan.paths_back(count).numpy())
        return self._paths_back[count]

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
        """As `visible`, or as MLX abbreviates it."""
        plan = self.plan
        if plan.is_prompt and (window is None or plan.kv_length <= window):
            return CAUSAL
        if plan.num_tokens == plan.num_rows == 1 and window is None:
            return None
        return self.visible(window)

    def visible(self, window: int | None) -> mx.array:
        """[A, 1, T, L] bool. window: as in `StepPlan.visible`."""
        if window not in self._visible:
            seen = self.plan.pad_rows(torch.from_numpy(self.plan.visible(window)))
            self._visible[window] = mx.array(seen.numpy())[:, None]
        return self._visible[window]


@dataclass(frozen=True, slots=True)
class WindowMask:
    """What a model gets for a mask and hands on to attention. window: tokens, the newest included; None: all."""

    window: int | None


class SeenKeys:
    """What a layer gets for the keys, or the values, that it has handed over: attention alone can use it."""

    def __init__(self, kept: mx.array, step: PackedStep, window: int | None):
        """kept: [A, Hkv, L, D], of the plan's rows. window: as the layer's own cache has it."""
        self.dtype = kept.dtype
        self.kept = kept
        self.step = step
        self.beside: SeenKeys | None = None  # of latents, what was handed over as their values: rotated keys
        self._window = window

    def swapaxes(self, *axes: int) -> mx.array:
        """Where a layer attends to latents, it hands on, instead of a mask, the scores of rotated queries and keys,
        their product with this. By the unit matrix it hands on the queries, which `attend` takes."""
        return mx.eye(self.kept.shape[-1], dtype=self.dtype)

    def agreed_window(self, mask: object) -> int | None:
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


def attend(
    queries: mx.array, keys: SeenKeys, values: SeenKeys, *, scale: float, mask: object, sinks: mx.array | None
) -> mx.array:
    """[M, H, 1, D] -> [M, H, 1, Dv]. mask: as the layer hands it on, a `WindowMask` or None; where `values` are `keys`,
    which are latents, rotated and scaled queries [M, H, 1, D] instead."""
    step = keys.step
    if values is keys and isinstance(mask, mx.array):
        scores = step.pad(mask) @ keys.beside.kept.swapaxes(-1, -2)
        seen = mx.where(step.visible(keys.agreed_window(None)), scores, mx.array(-mx.inf, scores.dtype))
    else:
        seen = step.mask(keys.agreed_window(mask))
    padded = mx.fast.scaled_dot_product_attention(
        step.pad(queries), keys.kept, values.kept, scale=scale, mask=seen, sinks=sinks
    )
    return step.unpad(padded)


def send_attention(model: nn.Module) -> None:
    """From now on the modules of the model send attention to `SeenKeys` where they get them; else all is as before."""
    send_calls(model, NAME, base.scaled_dot_product_attention, _sending)


def send_calls(model: nn.Module, name: str, function: Callable, sending: Callable[[Callable], Callable]) -> None:
    """Where the code of the model's modules calls `function` by `name`, it calls `sending(function)` from now on."""
    for module in model.modules():
        names = getattr(type(module).__call__, "__globals__", {})
        if names.get(name) is function:
            names[name] = sending(function)


def _sending(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @wraps(attention)
    def scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks=None):
        if isinstance(keys, SeenKeys):
            return attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return attention(queries, keys, values, cache, scale, mask, sinks)

    return scaled_dot_product_attention
