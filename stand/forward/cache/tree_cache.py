"""The key-value cache of a packed step: one room per row, each with its own length."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache

from stand.forward.cache.memory_limits import within_limits
from stand.forward.cache.system_memory import available_memory, whole_memory
from stand.forward.packed_plan import StepPlan
from stand.forward.recurrent.states import RecurrentStates
from stand.forward.recurrent.tree_scan import TreeScan

ROOM_QUANTUM = 256  # slots; rooms grow by doubling, rounded up to this
DRAFT_ROOM = 256  # slots behind a row's own tokens that its drafts may take


class SwappedForwards(Protocol):
    """Forwards that a model's modules may have in place of their own: `stand.fusion.fusion.Fusion`."""

    dtype: torch.dtype  # that the model must have

    def active(self) -> AbstractContextManager[None]: ...


class CacheMemoryError(MemoryError):
    """The rows of a call do not fit into memory."""


class TreeCache(Cache):
    """Keys and values [R, Hkv, S, D] per layer, made on first use with the layer's own head count and size.

    Rows 0 .. R-1 hold one trajectory each. `update` writes the plan's tokens behind their rows' committed slots and
    hands the attention function views of the plan's rows; `compact` moves the accepted path to the front;
    nothing else is kept, so a rejected token costs no clean-up.

    What the steps of a call need of a cache: `begin`, `update` and `get_seq_length` in a forward, `compact` after it,
    and between steps `leave` (a row has gone), `enter` (a row starts) and `move` (a row takes another place).

    has_windows: whether keys that no later token sees may be gone, so that only a text that goes on has what it needs.

    fusion: of the model, active in its forwards over this cache. A fused attention writes by itself, where `slots` say.
    """

    has_windows = False

    def __init__(self, num_rows: int, room: int, *, fusion: SwappedForwards | None = None):
        super().__init__(layers=[])
        self.fusion = fusion
        self.num_rows = num_rows
        self.room = round_up(room)
        self.most_room = 0  # rooms that double stop here, where set; a longer row still gets what it needs
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.recurrent = RecurrentStates(num_rows)
        self.layer_places: dict[int, int] = {}  # by index of a layer that keeps keys: where `keys` has them
        self._plan: StepPlan | None = None
        self._slots: torch.Tensor | None = None
        self._had_layers = False  # when the plan came

    def begin(self, plan: StepPlan) -> None:
        """Make room for the plan's tokens; the next forward writes them."""
        if plan.kv_length > self.room:
            self._grow(max(plan.kv_length, min(2 * self.room, self.most_room or 2 * self.room)))
        self._plan, self._slots, self._had_layers = plan, None, bool(self.keys)

    @property
    def plan(self) -> StepPlan:
        """Of the forward that is running."""
        if self._plan is None:
            raise RuntimeError("begin(plan) must come before a forward pass, got a forward without a plan")
        return self._plan

    @property
    def slots(self) -> torch.Tensor | None:
        """[M] int64: row * room + slot of the plan's tokens. None before the first forward has made the layers."""
        if self._slots is None and self._had_layers:
            self._slots = self._plan.cache_rows * self.room + self._plan.cache_slots
        return self._slots

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, Hkv, S, D] of one layer."""
        place = self.layer_places[layer_idx]
        return self.keys[place], self.values[place]

    def seen(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [A, Hkv, L, D] of the plan's rows: what the attention function gets."""
        plan = self._plan
        rows = slice(plan.first_row, plan.first_row + plan.num_rows)
        keys, values = self.layer(layer_idx)
        return keys[rows, :, : plan.kv_length], values[rows, :, : plan.kv_length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, Hkv, M, D] and return views [A, Hkv, L, D] of the plan's rows (called by the model's layers)."""
        plan = self.plan.on(key_states.device)
        if layer_idx not in self.layer_places:
            self.layer_places[layer_idx] = len(self.keys)
            self.keys.append(self._allocate(key_states))
            self.values.append(self._allocate(value_states))
        for storage, states in zip(self.layer(layer_idx), (key_states, value_states), strict=True):
            storage[plan.cache_rows, :, plan.cache_slots] = states[0].transpose(0, 1)
        return self.seen(layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest row's extent in the coming step, new tokens included (0 before the first)."""
        return self._plan.kv_length if self._plan is not None else 0

    def scan(self) -> TreeScan:
        """For layers with a recurrent state, in a forward."""
        return TreeScan(self.plan, self.recurrent)

    def keep_states(self, ends: Sequence[int]) -> None:
        """Recurrent states go on to token ends[a], row-local, of each row a of the last forward over drafts."""
        if self.recurrent.layers:
            self.recurrent.keep(self.plan, ends)

    def compact(self, rows: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy slot sources[i] of row rows[i] to slot targets[i], in every layer; reads come before writes."""
        if len(rows) == 0:
            return
        places: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
        for storage in (*self.keys, *self.values):
            kind = storage.shape[1], storage.device
            if kind not in places:
                places[kind] = [self._places(rows, slots, *kind) for slots in (sources, targets)]
            read, write = places[kind]
            states = storage.view(-1, storage.shape[3])
            states.index_copy_(0, write, states.index_select(0, read))

    def _places(self, rows: np.ndarray, slots: np.ndarray, heads: int, device: torch.device) -> torch.Tensor:
        """[n * heads] int64: of slot slots[i] of row rows[i], for every head, in a storage [R * Hkv * S, D]."""
        places = (rows[:, None] * heads + np.arange(heads)) * self.room + slots[:, None]
        return torch.from_numpy(places.ravel()).to(device)

    def enter(self, row: int, prefilled: TreeCache, length: int) -> None:
        """Row `row` starts with the first `length` slots of row 0 of `prefilled`; what it held is gone."""
        if length > self.room:
            self._grow(length)
        for own, others in ((self.keys, prefilled.keys), (self.values, prefilled.values)):
            for layer, states in enumerate(others):
                if layer == len(own):
                    own.append(self._allocate(states))
                self._begin_row(own[layer], row, states, prefilled, length)
        self.layer_places = self.layer_places or dict(prefilled.layer_places)
        self.recurrent.enter(row, prefilled.recurrent)

    def leave(self, row: int) -> None:
        """What row `row` held is of no further use."""

    def fan_out(self, sources: Sequence[int]) -> None:
        """Row i becomes a copy of today's row sources[i]."""
        self.num_rows = len(sources)
        self.recurrent.fan_out(sources)
        for storages in (self.keys, self.values):
            for layer, storage in enumerate(storages):
                wide = self._allocate(storage)
                for row, source in enumerate(sources):
                    wide[row] = storage[source]
                storages[layer] = wide

    def move(self, source: int, target: int, length: int) -> None:
        """Overwrite row `target` with the first `length` slots of row `source`."""
        for storage in (*self.keys, *self.values):
            storage[target, :, :length] = storage[source, :, :length]
        self.recurrent.move(source, target)

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in (*self.keys, *self.values)) + self.num_rows * self.recurrent.row_bytes

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros [R, Hkv, S, D] for all rows, with the heads, head size, dtype and device of `like` [*, Hkv, *, D]."""
        shape = (self.num_rows, like.shape[1], self.room, like.shape[3])
        nbytes = int(np.prod(shape, dtype=object)) * like.element_size()
        check_fits(nbytes, like.device)
        try:
            return like.new_zeros(shape)
        except (RuntimeError, MemoryError) as error:
            raise CacheMemoryError(_too_large(nbytes)) from error

    def _begin_row(
        self, storage: torch.Tensor, row: int, states: torch.Tensor, prefilled: TreeCache, length: int
    ) -> None:
        """Row `row` of `storage` starts with the first `length` slots of `states`, a storage of `prefilled`."""
        storage[row, :, :length] = states[0, :, :length]

    def _grow(self, room: int) -> None:
        old_room, self.room = self.room, round_up(room)
        for storages in (self.keys, self.values):
            for layer, storage in enumerate(storages):
                wide = self._allocate(storage)
                wide[:, :, :old_room] = storage
                storages[layer] = wide


def round_up(room: int) -> int:
    """To whole quanta."""
    return -(-room // ROOM_QUANTUM) * ROOM_QUANTUM


def check_fits(nbytes: int, device: torch.device) -> None:
    """Raise CacheMemoryError when `nbytes` exceed the device's whole memory."""
    if device.type in ("cuda", "xpu"):
        total = torch.get_device_module(device).get_device_properties(device).total_memory
    elif device.type in ("cpu", "mps"):
        total = whole_memory()
    else:
        return
    if nbytes > total:
        raise CacheMemoryError(_too_large(nbytes))


def available_bytes(device: torch.device) -> float:
    """What can still be allocated: of a GPU its free memory and what torch holds of it unused; of a CPU what the
    system has available, within the limits of the process's control groups. An Apple chip's GPU has no memory of its
    own: less than that, where Metal recommends less. Unlimited on other devices."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "xpu":
        return max(_left_of_intel(device), 0.0) + torch.xpu.memory_reserved(device) - torch.xpu.memory_allocated(device)
    if device.type == "mps":
        held = torch.mps.driver_allocated_memory()
        left = min(torch.mps.recommended_max_memory() - held, available_memory())
        return max(left, 0.0) + held - torch.mps.current_allocated_memory()
    return within_limits(available_memory()) if device.type == "cpu" else float("inf")


def _left_of_intel(device: torch.device) -> float:
    """What torch does not hold of an Intel GPU's memory, or less where the driver, which may count others' as free,
    says so. Of GPUs within processors it does not tell: their memory is the system's."""
    left = torch.xpu.get_device_properties(device).total_memory - torch.xpu.memory_reserved(device)
    try:
        return min(left, torch.xpu.mem_get_info(device)[0])
    except RuntimeError:
        return min(left, available_memory())


def _too_large(nbytes: int) -> str:
    return (
        f"the key-value cache must fit into memory, got a request for {nbytes / 2**30:.1f} GiB; "
        "lower num_return_sequences, max_new_tokens or the number of prompts per call"
    )
