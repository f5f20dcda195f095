"""Who computes what in tree attention: one item per (row, split of its keys, tile of its tokens).

Built on the host at draft time, where the lengths are known, and shipped with the step's packet. How a row is split
follows from its own length, its own number of tiles and the number of rows of the call, so the order of its sums never
depends on what its batch mates do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stand.step_compiled import ListArrays

ITEM_FIELDS = ("row_first", "q_first", "q_count", "cache_row", "length", "k_first", "k_end", "split")
SPLIT_QUANTUM = 64  # slots; a split is a whole number of the kernel's key blocks
INTERPRETED_PROCESSORS = 8


@dataclass(frozen=True, slots=True)
class Splitting:
    """A row's keys are split until its splits times its tiles come to `row_items` items, but into no split of fewer
    than `shortest` slots (a multiple of 64).

    One token behind 2,000 keys needs many short splits to occupy a GPU, 80 tokens behind 16,000 a few long ones: each
    split writes a partial result per token, which is read again. Where tokens see positions above their own less
    `window` alone (0: all of them), no split holds keys before the first of these, but for what its block takes along.
    """

    row_items: int
    shortest: int = SPLIT_QUANTUM
    window: int = 0

    def __post_init__(self) -> None:
        if self.row_items < 1 or self.shortest < 1 or self.shortest % SPLIT_QUANTUM or self.window < 0:
            raise ValueError(
                f"row_items must be at least 1, shortest a positive multiple of {SPLIT_QUANTUM} slots and window not "
                f"negative, got {self.row_items}, {self.shortest} and {self.window}; take Splitting.filling"
            )

    @classmethod
    def filling(
        cls, device: torch.device, *, key_heads: int, num_rows: int, programs: int = 1, window: int = 0
    ) -> Splitting:
        """So that all rows of a call together give every processor so many programs (an item and a key head each)."""
        processors = INTERPRETED_PROCESSORS
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(max(programs * processors // (key_heads * num_rows), 1), window=window)

    def most_splits(self, room: int) -> int:
        """Of a row of `room` slots, at most."""
        slots = min(room, self.window + SPLIT_QUANTUM) if self.window else room
        return max(min(self.row_items, -(-slots // self.shortest)), 1)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work of attention layers of one kind is cut into items: tokens of a row that share one, and splits."""

    tile_tokens: int
    splitting: Splitting

    def __post_init__(self) -> None:
        if self.tile_tokens < 1:
            raise ValueError(f"tile_tokens must be at least 1, got {self.tile_tokens}; take tiles.tile_tokens")

    def most_items(self, num_tokens: int, num_rows: int, room: int) -> int:
        """Items that `num_tokens` packed tokens of at most `num_rows` rows of `room` slots need at most."""
        rows = min(num_tokens, num_rows)
        tiles = rows + (num_tokens - rows) // self.tile_tokens  # one token in each row, the rest in full tiles of any
        return min(tiles + rows * self.splitting.row_items, tiles * self.splitting.most_splits(room))

    def most_partials(self, num_tokens: int, num_rows: int, room: int) -> int:
        """Partial results of a head that `num_tokens` packed tokens of at most `num_rows` rows need at most."""
        by_items = num_tokens + min(num_tokens, num_rows) * self.splitting.row_items * self.tile_tokens
        return min(by_items, num_tokens * self.splitting.most_splits(room))


@dataclass(frozen=True, slots=True)
class WorkList:
    """The items of one step. The kernel stops at the first item without tokens, so padding comes last.

    Slots [0, length) of cache row `cache_row` hold the row's committed keys and its new tokens follow, token i at slot
    length + i. An item attends the packed tokens [q_first, q_first + q_count) to the slots [k_first, k_end); the
    result of token m goes to place partial_starts[m] + split of the scratch.
    """

    items: np.ndarray  # [I, 8] int32, columns as in ITEM_FIELDS
    partial_starts: np.ndarray  # [M + 1] int32; a token's partial results end where the next one's begin

    @classmethod
    def build(
        cls,
        offsets: np.ndarray,  # [B + 1] first packed token of each row, then their number M
        lengths: np.ndarray,  # [B] committed tokens per row
        cache_rows: np.ndarray,  # [B] where each row's keys are
        tiling: Tiling,
    ) -> WorkList:
        """Items ordered by row, split, tile: neighbours read the same keys while those are in the GPU's cache.

        The last split takes the row's own new tokens too, up to the last one that its tile can see (a parent comes
        before its children). A row without new tokens has no items.
        """
        offsets = np.ascontiguousarray(offsets, dtype=np.int32)
        lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        cache_rows = np.ascontiguousarray(cache_rows, dtype=np.int64)
        most = tiling.most_items(int(offsets[-1]), len(lengths), int(lengths.max(initial=0)))
        items = np.empty((most, len(ITEM_FIELDS)), dtype=np.int32)
        partial_starts = np.empty(offsets[-1] + 1, dtype=np.int32)
        count = ListArrays(items, partial_starts, tiling).list(offsets, lengths, cache_rows)
        return cls(items[:count], partial_starts)
