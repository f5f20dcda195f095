"""Who computes what in tree attention: one item per (row, split of its keys, tile of its tokens).

Built on the host at draft time, where the lengths are known, and shipped with the step's packet. How a row is split
follows from its own length, its own number of tiles and the number of rows of the call, so the order of its sums never
depends on what its batch mates do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stand.gpu.packing import count_work, list_work

ITEM_FIELDS = ("row_first", "q_first", "q_count", "cache_row", "length", "k_first", "k_end", "split")
SPLIT_QUANTUM = 64  # slots; a split is a whole number of the kernel's key blocks
INTERPRETED_PROCESSORS = 8


@dataclass(frozen=True, slots=True)
class Splitting:
    """A row's keys are split until its splits times its tiles come to `row_items` items, but into no split of fewer
    than `shortest` slots (a multiple of 64).

    One token behind 2,000 keys needs many short splits to occupy a GPU, 80 tokens behind 16,000 a few long ones: each
    split writes a partial result per token, which is read again.
    """

    row_items: int
    shortest: int = SPLIT_QUANTUM

    def __post_init__(self) -> None:
        if self.row_items < 1 or self.shortest < 1 or self.shortest % SPLIT_QUANTUM:
            raise ValueError(
                f"row_items must be at least 1 and shortest a positive multiple of {SPLIT_QUANTUM} slots, got "
                f"{self.row_items} and {self.shortest}; take Splitting.filling"
            )

    @classmethod
    def filling(cls, device: torch.device, *, key_heads: int, num_rows: int, programs: int = 1) -> Splitting:
        """So that all rows of a call together give every processor so many programs (an item and a key head each)."""
        processors = INTERPRETED_PROCESSORS
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(max(programs * processors // (key_heads * num_rows), 1))

    def most_splits(self, room: int) -> int:
        """Of a row of `room` slots, at most."""
        return max(min(self.row_items, -(-room // self.shortest)), 1)

    def most_items(self, num_tokens: int, num_rows: int, room: int, *, tile_tokens: int) -> int:
        """Items that `num_tokens` packed tokens of at most `num_rows` rows need at most."""
        rows = min(num_tokens, num_rows)
        tiles = rows + (num_tokens - rows) // tile_tokens  # one token in each row, the rest in full tiles of any
        return min(tiles + rows * self.row_items, tiles * self.most_splits(room))

    def most_partials(self, num_tokens: int, num_rows: int, room: int, *, tile_tokens: int) -> int:
        """Partial results of a head that `num_tokens` packed tokens of at most `num_rows` rows need at most."""
        by_items = num_tokens + min(num_tokens, num_rows) * self.row_items * tile_tokens
        return min(by_items, num_tokens * self.most_splits(room))


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
        *,
        tile_tokens: int,
        splitting: Splitting,
    ) -> WorkList:
        """Items ordered by row, split, tile: neighbours read the same keys while those are in the GPU's cache.

        The last split takes the row's own new tokens too, up to the last one that its tile can see (a parent comes
        before its children). A row without new tokens has no items. `tile_tokens` >= 1 tokens share an item; raises
        ValueError below.
        """
        if tile_tokens < 1:
            raise ValueError(f"tile_tokens must be at least 1, got {tile_tokens}; take tiles.tile_tokens")
        offsets = np.ascontiguousarray(offsets, dtype=np.int32)
        lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        cache_rows = np.ascontiguousarray(cache_rows, dtype=np.int64)
        count, _ = count_work(offsets, lengths, tile_tokens, splitting.row_items, splitting.shortest)
        work = cls(np.empty((count, len(ITEM_FIELDS)), dtype=np.int32), np.empty(offsets[-1] + 1, dtype=np.int32))
        work.list(offsets, lengths, cache_rows, tile_tokens=tile_tokens, splitting=splitting, num_used=0)
        return work

    def list(
        self,
        offsets: np.ndarray,
        lengths: np.ndarray,
        cache_rows: np.ndarray,
        *,
        tile_tokens: int,
        splitting: Splitting,
        num_used: int,
    ) -> int:
        """Fill these arrays, which may be larger, as `build` does; the number of items, `num_used` of the next call.

        offsets int32, lengths and cache_rows int64, contiguous. Items from the last one up to `num_used` become zero,
        and tokens of padding have no partial results. Raises ValueError where the list does not fit.
        """
        return list_work(
            offsets, lengths, cache_rows, tile_tokens, splitting.row_items, splitting.shortest,
            out_items=self.items, out_partial_starts=self.partial_starts, num_used=num_used,
        )  # fmt: skip
