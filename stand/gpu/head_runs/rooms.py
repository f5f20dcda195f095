"""The cache of a trained head whose runs are recorded: rooms at fixed addresses, which kernels read as a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stand.forward.cache.tree_cache import TreeCache
from stand.forward.packed_plan import StepPlan
from stand.gpu.kernel_attention import KernelPlan


@dataclass(frozen=True, slots=True)
class RoomsPlan:
    """One part of a recorded run: M tokens at addresses that stay. As a `StepPlan`. told: None where no token
    attends."""

    input_ids: torch.Tensor  # [1, M] int64
    position_ids: torch.Tensor  # [1, M] int64
    rows: torch.Tensor  # [M] int64: rooms that the tokens' keys go to
    slots: torch.Tensor  # [M] int64: their places there
    told: KernelPlan | None


class KernelRooms(TreeCache):
    """A `TreeCache` with one room more, where padding writes. Its rows change places without new addresses, so that
    what is recorded stays; `version` counts the times when they did not.

    A layer's keys [R + 1, Hkv, S, D] are a pool whose page r is the room of row r.
    """

    def __init__(self, num_rows: int, room: int) -> None:
        self.capacity = 1 << (num_rows - 1).bit_length()
        self.version = 0
        self._now: RoomsPlan | None = None  # of the running body
        super().__init__(self.capacity + 1, room)

    def holds(self, num_rows: int, room: int) -> bool:
        """Whether so many rows with so many slots fit."""
        return num_rows <= self.capacity and room <= self.room

    def begin(self, plan: StepPlan | RoomsPlan) -> None:
        """Rooms must be long enough for a recorded plan: see `reserve`."""
        if isinstance(plan, RoomsPlan):
            self._now = plan
        else:
            self._now = None
            super().begin(plan)

    def reserve(self, room: int) -> None:
        """At least so many slots per row."""
        if room > self.room:
            self._grow(max(room, 2 * self.room))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, Hkv, M, D]; of a recorded plan the layer's whole storage, as the kernels take it."""
        if self._now is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        for storage, states in zip(self.layer(layer_idx), (key_states, value_states), strict=True):
            storage[self._now.rows, :, self._now.slots] = states[0].transpose(0, 1)
        return self.layer(layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx) if self._now is None else self.room

    def fan_out(self, sources: Sequence[int]) -> None:
        """Row i becomes a copy of today's row sources[i]; rows beyond have nothing of use."""
        if len(sources) > self.capacity:
            self.capacity = 1 << (len(sources) - 1).bit_length()
            self.version += 1
            super().fan_out([*sources, *[0] * (self.capacity + 1 - len(sources))])
            return
        moved = [(source, row) for row, source in enumerate(sources) if source != row]
        if not moved or not self.keys:
            return
        read, write = (torch.tensor(places, device=self.keys[0].device) for places in zip(*moved, strict=True))
        for storage in (*self.keys, *self.values):
            storage[write] = storage[read]

    def _grow(self, room: int) -> None:
        self.version += 1
        super()._grow(room)
