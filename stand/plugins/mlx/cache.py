"""Rows of a model of mlx-lm: rooms of keys and values as arrays of MLX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx_lm.models.cache import ArraysCache, CacheList

from stand.forward.cache.tree_cache import TreeCache, check_fits
from stand.forward.packed_plan import StepPlan
from stand.plugins.mlx.attention import PackedStep, SeenKeys, WindowMask
from stand.plugins.mlx.recurrent import RecurrentLayer, RoomStates, forget_asked

CPU = torch.device("cpu")  # an Apple chip's memory is one


class LayerCache:
    """What a layer of the model takes for its own cache in a forward over packed tokens."""

    def __init__(self, rooms: RoomCache, place: int, step: PackedStep, window: int | None):
        self.offset = step.positions  # [M]: MLX rotates each text of a batch from a place of its own
        self._rooms, self._place, self._step, self._window = rooms, place, step, window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[SeenKeys, SeenKeys]:
        """[M, Hkv, 1, D] each, written behind their rows' committed slots."""
        kept = self._rooms.write(self._place, keys, values, self._step)
        seen_keys, seen_values = (SeenKeys(states, self._step, self._window) for states in kept)
        seen_keys.beside = seen_values
        return seen_keys, seen_values

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> WindowMask | None:
        """None where the model would compute with it: each token looks like a text of one, which needs no mask. Raises
        ValueError where it would then lose a window."""
        if not return_array:
            return WindowMask(window_size or self._window)
        if window_size not in (None, self._window):
            raise ValueError(
                f"a layer that computes with its mask must have its window in its cache, too, got {window_size} and "
                f"{self._window} tokens; this model cannot be served"
            )
        return None


class RoomCache(TreeCache):
    """Keys and values [R, Hkv, S, D] per layer that keeps them, in rooms of one length for all rows, and states."""

    def __init__(self, model: nn.Module, kinds: Sequence[object], num_rows: int, room: int):
        """kinds: empty caches of mlx-lm, one for each that the model would make: what its layers keep."""
        super().__init__(num_rows, room)
        self._model = model
        self._kinds = kinds
        self.recurrent = RoomStates(num_rows)

    def run(self, plan: StepPlan, num_outputs: int) -> torch.Tensor:
        """Logits [num_outputs, V] float32 of the last tokens of the plan that has begun."""
        if plan.is_prompt and num_outputs < plan.num_tokens:  # those before them need no logits
            first, committed = plan.num_tokens - num_outputs, int(plan.lengths[0])
            self._forward(StepPlan.for_prompt(plan.token_ids[:first], committed, row=plan.first_row))
            logits = self._forward(plan.last(num_outputs))
        else:
            logits = self._forward(plan)[plan.num_tokens - num_outputs :]
        logits = logits[:, 0].astype(mx.float32)
        mx.eval(logits, self.keys, self.values, self.recurrent.arrays)
        return torch.from_numpy(np.array(logits))

    def _forward(self, plan: StepPlan) -> mx.array:
        """[M, 1, V]."""
        step, places = PackedStep(plan), count()
        caches = [self._layer_cache(kind, step, places, index) for index, kind in enumerate(self._kinds)]
        try:
            return self._model(mx.array(plan.token_ids.astype(np.int32))[:, None], cache=caches)
        finally:
            forget_asked()

    def _layer_cache(self, kind: object, step: PackedStep, places: Iterator[int], index: int) -> object:
        """places: of the next layers that keep keys. index: of the layer among those that keep something."""
        if isinstance(kind, CacheList):
            return [self._layer_cache(part, step, places, index) for part in kind.caches]
        if isinstance(kind, ArraysCache):
            return RecurrentLayer(self.recurrent, self.recurrent.layer(index, len(kind.cache)), step)
        return LayerCache(self, next(places), step, getattr(kind, "max_size", None))

    def write(self, place: int, keys: mx.array, values: mx.array, step: PackedStep) -> tuple[mx.array, mx.array]:
        """Write [M, Hkv, 1, D] each for the layer at `place`; [A, Hkv, L, D] of the plan's rows."""
        plan = step.plan
        rows = slice(plan.first_row, plan.first_row + plan.num_rows)
        seen = []
        for storages, states in ((self.keys, keys), (self.values, values)):
            if place == len(storages):
                storages.append(self._allocate(states))
            storages[place][step.rows, :, step.slots] = states[:, :, 0]
            seen.append(storages[place][rows, :, : plan.kv_length])
        return tuple(seen)

    def compact(self, rows: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> None:
        rows, sources, targets = (mx.array(numbers.astype(np.int32)) for numbers in (rows, sources, targets))
        for storage in (*self.keys, *self.values):
            storage[rows, :, targets] = storage[rows, :, sources]

    def enter(self, row: int, prefilled: RoomCache, length: int) -> None:
        super().enter(row, prefilled, length)
        mx.eval(self.keys, self.values, self.recurrent.arrays)  # else it would hold what was prefilled

    def _allocate(self, like: mx.array) -> mx.array:
        shape = (self.num_rows, like.shape[1], self.room, like.shape[3])
        check_fits(int(np.prod(shape, dtype=object)) * like.dtype.size, CPU)
        return mx.zeros(shape, dtype=like.dtype)
