"""A key-value cache whose memory follows its rows' tokens, page by page, and whose rows share their prompts' pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from stand.forward.cache.mapped_memory import SYSTEM_PAGE, AddressSpace, SharedBlock, SharedFile
from stand.forward.cache.tree_cache import SwappedForwards, TreeCache, round_up
from stand.forward.packed_plan import StepPlan

PAGE_SIZES = (16, 32, 64, 128, 256)  # slots; a room is a whole number of the largest


def fitting_page_size(slot_bytes: int) -> int | None:
    """The smallest of `PAGE_SIZES` whose slots, of `slot_bytes` per head, fill whole pages of the system."""
    return next((size for size in PAGE_SIZES if size * slot_bytes % SYSTEM_PAGE == 0), None)


def most_shown_rows(num_layers: int, num_heads: int) -> int:
    """Rows that can share prompts at once: every head of a row that does is two of the mappings that Linux limits."""
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    except (OSError, ValueError):
        limit = 65530  # Linux's default
    return max(limit // 2 // (2 * 2 * num_layers * num_heads), 1)


class PromptRoom(TreeCache):
    """One row whose memory rows of a `PagedCache` can share."""

    def __init__(self, file: SharedFile, room: int, *, fusion: SwappedForwards | None = None):
        super().__init__(num_rows=1, room=room, fusion=fusion)
        self._file = file
        self._blocks: dict[int, SharedBlock] = {}  # by the address of the storage in it

    def block(self, storage: torch.Tensor) -> SharedBlock:
        """What one of `keys` or `values` lies in."""
        return self._blocks[storage.data_ptr()]

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        shape = (1, like.shape[1], self.room, like.shape[3])
        block = SharedBlock(self._file, torch.Size(shape).numel() * like.element_size())
        storage = block.tensor(shape, like.dtype)
        self._blocks[storage.data_ptr()] = block
        return storage


class PagedCache(TreeCache):
    """A `TreeCache` on a CPU. Its rooms are addresses; there is memory behind those pages that were written.

    A row that enters with the keys of a `PromptRoom` shares their pages with it and with all rows that do. The system
    copies the last of these pages when the row first writes behind the prompt.
    """

    def __init__(self, num_rows: int, room: int, *, page_size: int, fusion: SwappedForwards | None = None):
        super().__init__(num_rows, room, fusion=fusion)
        self._page_size = page_size
        self._spaces: dict[int, AddressSpace] = {}  # by the address of the storage in it
        self._begun: list[tuple[TreeCache, int] | None] = [None] * num_rows  # what a row began with, and its length
        self._ends = np.zeros(num_rows, dtype=np.int64)  # by row: no slot from here on was written

    @property
    def spaces(self) -> list[AddressSpace]:
        """Whose memory it is."""
        return list(self._spaces.values())

    def begin(self, plan: StepPlan) -> None:
        super().begin(plan)
        rows = slice(plan.first_row, plan.first_row + plan.num_rows)
        np.maximum(self._ends[rows], plan.ends, out=self._ends[rows])

    def enter(self, row: int, prefilled: TreeCache, length: int) -> None:
        self.leave(row)
        super().enter(row, prefilled, length)
        self._begun[row], self._ends[row] = (prefilled, length), length

    def leave(self, row: int) -> None:
        if self._begun[row] is not None:
            for storage in (*self.keys, *self.values):
                self._drop(storage, row)
            self._begun[row] = None

    def move(self, source: int, target: int, length: int) -> None:
        """As in `TreeCache`, and `source` leaves. Memory for both is taken by one layer at a time."""
        prefilled, shared = self._begun[source]
        self.enter(target, prefilled, shared)
        self._ends[target] = length
        for storage in (*self.keys, *self.values):
            storage[target, :, shared:length] = storage[source, :, shared:length]
            self._drop(storage, source)
        self._begun[source] = None

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.num_rows, like.shape[1], self.room, like.shape[3])
        space = AddressSpace(torch.Size(shape).numel() * like.element_size())
        storage = space.tensor(shape, like.dtype)
        self._spaces[storage.data_ptr()] = space
        return storage

    def _begin_row(
        self, storage: torch.Tensor, row: int, states: torch.Tensor, prefilled: TreeCache, length: int
    ) -> None:
        """Show the pages of `states` [1, Hkv, S, D], head by head."""
        if not isinstance(prefilled, PromptRoom):
            super()._begin_row(storage, row, states, prefilled, length)
            return
        space, block = self._spaces[storage.data_ptr()], prefilled.block(states)
        slot = storage.shape[3] * storage.element_size()
        shared = -(-length // self._page_size) * self._page_size * slot
        for head in range(storage.shape[1]):
            first = (row * storage.shape[1] + head) * self.room * slot
            space.show(first, shared, block, head * prefilled.room * slot)

    def _drop(self, storage: torch.Tensor, row: int) -> None:
        nbytes = storage[row].nbytes
        self._spaces[storage.data_ptr()].drop(row * nbytes, nbytes)

    def _grow(self, room: int) -> None:
        """Other addresses: what the rows began with is shown there, what they wrote is copied."""
        before, self.room = (self.keys, self.values), round_up(room)
        self._spaces = {}  # the old ones stay as long as their tensors
        self.keys, self.values = [], []
        for old, new in zip(before, (self.keys, self.values), strict=True):
            new.extend(self._allocate(storage) for storage in old)
        for row, begun in enumerate(self._begun):
            if begun is not None:
                TreeCache.enter(self, row, *begun)
                for old, new in zip((*before[0], *before[1]), (*self.keys, *self.values), strict=True):
                    new[row, :, begun[1] : self._ends[row]] = old[row, :, begun[1] : self._ends[row]]
