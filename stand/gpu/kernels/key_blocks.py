"""Where a block of keys lies: its first slot, its pages, its cells in the pool, and which of them hold numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_of_keys(block, num_prefix_blocks, first, length, BLOCK_N: tl.constexpr):
    """(whether it holds new tokens, the first of them, its first slot)"""
    is_tail = block >= num_prefix_blocks
    tail_first = tl.maximum(block - num_prefix_blocks, 0) * BLOCK_N
    return is_tail, tail_first, tl.where(is_tail, length + tail_first, first + block * BLOCK_N)


@triton.jit
def pages_at(row_pages, start, last, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Numbers of the pages in which a block of slots from `start` up to `last` begins and ends."""
    near = tl.load(row_pages + tl.minimum(start, last) // PAGE_SIZE)
    far = tl.load(row_pages + tl.minimum(start + BLOCK_N - 1, last) // PAGE_SIZE)
    return near, far


@triton.jit
def block_offsets(
    start, columns, near, far, PAGE_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    IS_PAGED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_D] where a block of slots from `start` lies in the pool, in pages `near` and `far`."""
    cells = columns[:, None] * SLOT_STRIDE + tl.arange(0, BLOCK_D)[None, :]
    if IS_PAGED:
        inner = start % PAGE_SIZE
        jump = (far - near).to(tl.int64) * PAGE_STRIDE - PAGE_SIZE * SLOT_STRIDE
        offsets = near.to(tl.int64) * PAGE_STRIDE + inner * SLOT_STRIDE + cells
        # By `tl.where` Triton 3.8 and 3.9 would not know that 16 bytes lie together, and copy nothing ahead.
        offsets += ((inner + columns >= PAGE_SIZE).to(tl.int64) * jump)[:, None]
    else:
        offsets = near.to(tl.int64) * PAGE_STRIDE + start.to(tl.int64) * SLOT_STRIDE + cells
    return offsets


@triton.jit
def real_cells(inside, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Which of a block's cells hold numbers, where `inside` says it of its rows: padding to a power of two does not."""
    real = inside[:, None]
    if BLOCK_D != SIZE:
        real = real & (tl.arange(0, BLOCK_D) < SIZE)[None, :]
    return real
