"""Steps of a model of mlx-lm."""

from __future__ import annotations

from collections.abc import Callable

from stand.plugins.mlx.cache import RoomCache
from stand.plugins.mlx.model import MlxModel
from stand.step import EagerStep, StepStart


class MlxBackend:
    """Eager steps over rooms of MLX. Its device, or its own threads on a CPU, compute them."""

    name = "mlx"
    most_rows = most_drafted = num_slots = page_size = None
    held_bytes = 0
    computes_elsewhere = True
    has_pool = False
    step_sizes = ()
    fusion = None

    def __init__(self, model: MlxModel):
        self.reason = model.way
        self._model = model

    def __str__(self) -> str:
        return self.reason

    def key_maker(self) -> Callable[[int], RoomCache]:
        return lambda room: self._model.new_cache(1, room)

    def new_kept_keys(self) -> RoomCache:
        return self._model.new_cache(1, 0)

    def new_step(self, start: StepStart) -> EagerStep:
        self._model.refuse_training()
        cache = self._model.new_cache(start.num_places, max(row.num_cached for row in start.rows) + 1)
        return EagerStep(self._model, cache, start.law, start.verifier, num_top=start.num_top)
