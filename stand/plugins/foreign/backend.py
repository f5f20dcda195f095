"""Steps of a model that another library runs: eager ones, over its own cache."""

from __future__ import annotations

from collections.abc import Callable

from stand.forward.ranks import ALONE
from stand.plugins.foreign.model import ForeignModel, RunningCache
from stand.step import EagerStep, StepStart


class ForeignBackend:
    """A `Backend` of these steps. What a library has otherwise, its own class says."""

    name: str
    most_rows = most_drafted = num_slots = page_size = None
    held_bytes = 0
    computes_elsewhere = True
    has_pool = False
    step_sizes = ()
    fusion = None
    ranks = ALONE

    def __init__(self, model: ForeignModel):
        self.reason = model.way
        self._model = model

    def __str__(self) -> str:
        return self.reason

    def key_maker(self) -> Callable[[int], RunningCache]:
        return lambda room: self._model.new_cache(1, room)

    def new_kept_keys(self) -> RunningCache:
        return self._model.new_cache(1, 0)

    def new_step(self, start: StepStart) -> EagerStep:
        self._model.refuse_unready()
        cache = self._model.new_cache(start.num_places, max(row.num_cached for row in start.rows) + 1)
        return EagerStep(self._model, cache, start.law, start.verifier, **start.asked)

    def new_recorder(self) -> None:
        """Nothing is recorded."""
