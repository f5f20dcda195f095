"""Who computes what in tree attention: one item per (row, split of its keys, tile of its tokens).

Built on the host at draft time, where the lengths are known, and shipped with the step's packet. The split length is
fixed, so a row's splits, and with them the order of its sums, depend on that row alone and never on its batch mates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stand.gpu.packing import list_work

ITEM_FIELDS = ("row_first", "q_first", "q_count", "cache_row", "length", "k_first", "k_end", "split")
SPLIT_LENGTH = 512  # slots per piece of attention work; fixed, so that no row's sums depend on its batch mates
SPLIT_QUANTUM = 64  # slots; a split is a whole number of the kernel's key blocks


@dataclass(frozen=True, slots=True)
class WorkList:
    """The items of one step. The kernel stops at the first item without tokens, so padding stands at the end.

    Slots [0, length) of cache row `cache_row` hold the row's committed keys and its new tokens follow, token i at slot
    length + i. An item attends the packed tokens [q_first, q_first + q_count) to the slots [k_first, k_end) and writes
    partial result number `split`.
    """

    items: np.ndarray  # [I, 8] int32, columns as in ITEM_FIELDS
    num_splits: np.ndarray  # [M] int32, partial results per packed token; 0 for padding

    @classmethod
    def build(
        cls,
        offsets: np.ndarray,  # [B + 1] first packed token of each row, then their number M
        lengths: np.ndarray,  # [B] committed tokens per row
        cache_rows: np.ndarray,  # [B] where each row's keys are
        *,
        tile_tokens: int,
        split_length: int,
    ) -> WorkList:
        """Items ordered by row, split, tile: neighbours read the same keys while those are in the GPU's cache.

        The last split takes the row's own new tokens too, up to the last one that its tile can see (a parent stands
        before its children). A row without new tokens has no items. `tile_tokens` >= 1 tokens share an item;
        `split_length` is in slots, a multiple of 64. Raises ValueError outside these.
        """
        _check(tile_tokens, split_length)
        offsets = np.ascontiguousarray(offsets, dtype=np.int32)
        lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        cache_rows = np.ascontiguousarray(cache_rows, dtype=np.int64)
        return cls(*list_work(offsets, lengths, cache_rows, tile_tokens, split_length))

    def fill(self, items: np.ndarray, num_splits: np.ndarray) -> None:
        """Copy into the step's static buffers [I', 8] and [M'] int32, the rest zero: items and tokens of padding.

        Raises ValueError when a buffer is too small.
        """
        for name, source, target in (("items", self.items, items), ("num_splits", self.num_splits, num_splits)):
            if len(target) < len(source):
                raise ValueError(
                    f"the buffer for {name} must hold the whole list, got {len(target)} places for {len(source)}; "
                    "size it with most_items and the step's token count"
                )
            target[: len(source)] = source
            target[len(source) :] = 0


def most_items(num_tokens: int, num_rows: int, room: int, *, tile_tokens: int, split_length: int) -> int:
    """Items that `num_tokens` packed tokens of at most `num_rows` rows with `room` slots each need at most."""
    _check(tile_tokens, split_length)
    rows = min(num_tokens, num_rows)
    tiles = rows + (num_tokens - rows) // tile_tokens  # one token in each row, the rest in full tiles of any of them
    return tiles * most_splits(room, split_length)


def most_splits(room: int, split_length: int) -> int:
    """Partial results per token that a row of `room` slots needs at most."""
    return max(-(-room // split_length), 1)


def _check(tile_tokens: int, split_length: int) -> None:
    if tile_tokens < 1:
        raise ValueError(
            f"tile_tokens must be at least 1, got {tile_tokens}; take it from attention_kernel.tile_tokens"
        )
    if split_length < 1 or split_length % SPLIT_QUANTUM:
        raise ValueError(
            f"split_length must be a positive multiple of {SPLIT_QUANTUM} slots, got {split_length}; take 512 or 1024"
        )
