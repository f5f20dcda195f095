"""Pairs of a token and one of its experts, sorted by expert, and cut into tiles of one expert each.

Pair number token * k + j is the token's j-th expert. The order is that of a stable sort. Everything is done on the
device, in shapes that do not depend on what tokens choose, so that a graph can hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device

BLOCK = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs(experts, order, starts, num_pairs, BLOCK: tl.constexpr):
    """Program (expert): counts the pairs of smaller experts, then writes its own behind them.

    experts [P] int64; order [P] int32; starts [E + 1] int32. Pairs of ids beyond E are left out.
    """
    expert = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    smaller = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        inside = start + places < num_pairs
        ids = tl.load(experts + start + places, mask=inside, other=0)
        smaller += (inside & (ids < expert)).to(tl.int32)
    count = tl.sum(smaller, axis=0)
    tl.store(starts + expert, count)
    for start in range(0, num_pairs, BLOCK):
        inside = start + places < num_pairs
        ids = tl.load(experts + start + places, mask=inside, other=0)
        is_own = (inside & (ids == expert)).to(tl.int32)
        ranks = count + tl.cumsum(is_own, axis=0) - 1
        tl.store(order + ranks, start + places, mask=is_own > 0)
        count += tl.sum(is_own, axis=0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, count)


@triton.jit
def find_tile(starts, tile, num_experts, TOKENS: tl.constexpr, BLOCK_E: tl.constexpr):
    """(expert, the tile's first place in the order, the end of the expert's places) of a tile of TOKENS places.

    Tiles are numbered expert by expert. Behind the last tile the expert is `num_experts`.
    """
    ids = tl.arange(0, BLOCK_E)
    inside = ids < num_experts
    begins = tl.load(starts + ids, mask=inside, other=0)
    ends = tl.load(starts + ids + 1, mask=inside, other=0)
    counted = tl.cumsum(tl.cdiv(ends - begins, TOKENS), axis=0)  # tiles up to and with each expert
    is_before = inside & (counted <= tile)
    expert = tl.sum(is_before.to(tl.int32), axis=0)
    before = tl.max(tl.where(is_before, counted, 0), axis=0)
    is_tile = expert < num_experts
    first = tl.load(starts + expert, mask=is_tile, other=0) + (tile - before) * TOKENS
    return expert, first, tl.load(starts + expert + 1, mask=is_tile, other=0)


def sort_pairs(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order [M * k], starts [E + 1]), int32, of experts [M, k] int64, contiguous.

    order[starts[e] : starts[e + 1]] are the pairs of expert e, ascending.
    """
    order = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=experts.device)
    with launch_device(_sort_pairs, experts):
        _sort_pairs[(num_experts,)](experts, order, starts, experts.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS)
    return order, starts
