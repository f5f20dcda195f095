"""The merge of tree attention: results of a tile's splits, weighted by the mass that each of them saw.

The program that finishes a tile last merges it, so that no launch of its own is needed. A counter per tile says who
that is; the order of the sums is that of the splits, whoever was last.
"""

from __future__ import annotations

import triton
import triton.language as tl

MERGED_ROWS_PER_WARP = 2  # query rows that are merged at once
MOST_MERGED = 512  # numbers of a query row that are read at once


def merged_splits(head_size: int) -> int:
    """Results of a query row that are read at once: as many as registers hold."""
    return max(MOST_MERGED // triton.next_power_of_2(head_size), 1)


@triton.jit
def is_last(arrivals, num_splits):
    """Whether all `num_splits` programs of a tile have stored their results; asked by each, after it has.

    arrivals: the tile's counter, int32, 0 before the first and 0 again after the last. The barrier puts the stores of
    all threads before the one thread's atomic operation; acquire and release carry them to the program that reads.
    """
    tl.debug_barrier()
    is_complete = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == num_splits - 1
    if is_complete:
        tl.store(arrivals, 0)
    return is_complete


@triton.jit
def merge_tile(
    partials, log_sums, mixed, first_partial, num_splits, first_token, num_rows, key_head, KEY_HEADS: tl.constexpr,
    GROUPS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The results of `num_rows` query rows (tokens from `first_token` on times grouped heads) to `mixed` [M, H, D].

    partials [P, H, D] float32; log_sums [P, H] float32; the results of the first token begin at `first_partial`.
    """
    sizes = tl.arange(0, BLOCK_D)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = rows < num_rows
        tile = inside[:, None]
        if BLOCK_D != HEAD_SIZE:
            tile = tile & (sizes < HEAD_SIZE)[None, :]
        heads = key_head * GROUPS + rows % GROUPS
        begins = first_partial + rows // GROUPS * num_splits
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        accumulator = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for chunk in range(0, num_splits, SPLITS):
            for step in tl.static_range(SPLITS):
                split = chunk + step
                places = (begins + split).to(tl.int64) * (KEY_HEADS * GROUPS) + heads
                log_sum = tl.load(log_sums + places, mask=inside & (split < num_splits), other=float("-inf"))
                cells = places[:, None] * HEAD_SIZE + sizes[None, :]
                part = tl.load(partials + cells, mask=tile & (split < num_splits), other=0.0)
                new_highest = tl.maximum(highest, log_sum)
                reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
                weight = tl.exp2(log_sum - reference)
                shrink = tl.exp2(highest - reference)
                mass = mass * shrink + weight
                accumulator = accumulator * shrink[:, None] + part * weight[:, None]
                highest = new_highest
        result = accumulator / tl.where(mass > 0, mass, 1.0)[:, None]
        cells = ((first_token + rows // GROUPS).to(tl.int64) * (KEY_HEADS * GROUPS) + heads)[:, None] * HEAD_SIZE
        tl.store(mixed + cells + sizes[None, :], result.to(mixed.dtype.element_ty), mask=tile)


@triton.jit
def clear_padding(mixed, partial_starts, num_tokens, ROW_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros for the tokens that no item covers: those without partial results."""
    token = tl.program_id(0)
    while token < num_tokens:
        if tl.load(partial_starts + token) == tl.load(partial_starts + token + 1):
            for first in range(0, ROW_SIZE, BLOCK):
                cells = first + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK], mixed.dtype.element_ty)
                tl.store(mixed + token.to(tl.int64) * ROW_SIZE + cells, zeros, mask=cells < ROW_SIZE)
        token += tl.num_programs(0)
