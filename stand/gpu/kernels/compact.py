"""Compaction of the key-value cache after a step: accepted nodes move to the front, all layers in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device

BLOCK_DEPTHS = 16  # accepted nodes moved at once; longer paths take turns


@triton.jit
def _slot_offsets(row_pages, slots, is_used, stride_page, stride_slot, PAGE_SIZE: tl.constexpr):
    """Where the slots of a row lie in a layer and head."""
    pages = tl.load(row_pages + slots // PAGE_SIZE, mask=is_used, other=0).to(tl.int64)
    return pages * stride_page + slots % PAGE_SIZE * stride_slot


@triton.jit
def _compact(
    storage, pages, cache_rows, lengths, path, num_heads, head_size, max_depth,
    stride_layer, stride_page, stride_head, stride_slot, stride_table, stride_path,
    PAGE_SIZE: tl.constexpr, BLOCK_PATH: tl.constexpr, BLOCK_DEPTHS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (row, layer and head): slot length + path[j] -> slot length + 1 + j.

    A turn loads all its vectors before it stores one. Turns cannot hurt each other either: paths descend a tree whose
    parents stand before their children, so path[j] ascends strictly and path[j] >= j + 1. What an earlier turn wrote,
    slots up to j + 1 <= path[j], lies below everything that a later turn reads, path[j + 1] and above; and what a later
    turn overwrites had been read before the barrier of the earlier one.
    """
    row, state = tl.program_id(0), tl.program_id(1)
    depths = tl.arange(0, BLOCK_PATH)
    nodes = tl.load(path + row * stride_path + depths, mask=depths < max_depth, other=-1)
    # One past the deepest node that is not in place already: 0 for most rows, whose program ends here.
    end = tl.max(tl.where((nodes >= 0) & (nodes != depths + 1), depths + 1, 0), axis=0)
    if end > 0:
        layer, head = (state // num_heads).to(tl.int64), state % num_heads
        base = storage + layer * stride_layer + head.to(tl.int64) * stride_head
        row_pages = pages + tl.load(cache_rows + row).to(tl.int64) * stride_table
        length = tl.load(lengths + row).to(tl.int64)
        elements = tl.arange(0, BLOCK_SIZE)
        for start in range(0, end, BLOCK_DEPTHS):
            targets = start + tl.arange(0, BLOCK_DEPTHS)
            sources = tl.load(path + row * stride_path + targets, mask=targets < end, other=-1).to(tl.int64)
            is_moved = (sources >= 0) & (sources != targets + 1)
            cells = is_moved[:, None] & (elements < head_size)[None, :]
            read = _slot_offsets(row_pages, length + sources, is_moved, stride_page, stride_slot, PAGE_SIZE)
            write = _slot_offsets(row_pages, length + targets + 1, is_moved, stride_page, stride_slot, PAGE_SIZE)
            values = tl.load(base + read[:, None] + elements[None, :], mask=cells)
            tl.debug_barrier()
            tl.store(base + write[:, None] + elements[None, :], values, mask=cells)


@torch.library.custom_op("stand::compact", mutates_args=("storage",))
def compact(
    storage: torch.Tensor, pages: torch.Tensor, cache_rows: torch.Tensor, lengths: torch.Tensor, path: torch.Tensor
) -> None:
    """Move slot lengths[b] + path[b, j] to slot lengths[b] + 1 + j of row cache_rows[b], in all layers and heads.

    storage: [C, P, Hkv, S, D] or [layers, 2, P, Hkv, S, D]: P pages of S slots, any strides that keep D contiguous and
    the layers evenly spaced; written to. pages [R, T] int32: slot s of row r is in page pages[r, s // S]. cache_rows,
    lengths: [B] int32 or int64, rows distinct. path: [B, L] int32 or int64, the row-local nodes kept at depths 1, 2,
    ..., each a child of the one before, -1 behind the last. Slot lengths[b] holds the root, which stays. A row whose
    path is 1, 2, ... already, or empty, costs next to nothing.
    """
    _check_arguments(storage, pages, cache_rows, lengths, path)
    layers = storage if storage.ndim == 5 else storage.flatten(0, 1)
    num_states, _, num_heads, page_size, head_size = layers.shape
    num_rows, max_depth = path.shape
    with launch_device(_compact, storage):
        _compact[(num_rows, num_states * num_heads)](
            layers, pages, cache_rows, lengths, path, num_heads, head_size, max_depth,
            *layers.stride()[:4], pages.stride(0), path.stride(0),
            PAGE_SIZE=page_size, BLOCK_PATH=triton.next_power_of_2(max_depth), BLOCK_DEPTHS=BLOCK_DEPTHS,
            BLOCK_SIZE=triton.next_power_of_2(head_size), num_warps=2,
        )  # fmt: skip


@compact.register_fake
def _(storage, pages, cache_rows, lengths, path):
    return None


def _check_arguments(storage, pages, cache_rows, lengths, path) -> None:
    is_even = storage.ndim == 5 or (
        storage.ndim == 6 and storage.stride(0) == storage.shape[1] * storage.stride(1)
    )  # else flatten would copy, and the copy would be compacted
    if not is_even or storage.stride(-1) != 1:
        raise ValueError(
            "compact needs storage [C, P, Hkv, S, D] or [layers, 2, P, Hkv, S, D] with contiguous D and evenly spaced "
            f"layers, got {list(storage.shape)} with strides {storage.stride()}; pass the cache's own block"
        )
    shapes = [list(tensor.shape) for tensor in (cache_rows, lengths, path)]
    integers = {tensor.dtype for tensor in (cache_rows, lengths, path)} <= {torch.int32, torch.int64}
    if path.ndim != 2 or path.stride(1) != 1 or shapes[:2] != [[len(path)]] * 2 or not integers:
        raise ValueError(
            f"compact needs integers cache_rows [B], lengths [B] and path [B, L], got {shapes}; pass one entry per row"
        )
    if pages.ndim != 2 or pages.dtype != torch.int32 or pages.stride(1) != 1:
        raise ValueError(
            f"compact needs pages [R, T] int32, got {list(pages.shape)} in {pages.dtype}; pass the packet's"
        )
