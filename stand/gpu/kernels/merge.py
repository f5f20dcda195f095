"""The merge of tree attention: results of a token's splits, weighted by the mass that each of them saw.

A launch of its own, in which all processors take part. A tile's last program can merge without one, but then a single
processor reads all results of the tile: on an H100 that took 8 us a layer for one token behind 2,048 keys, 41 us for 16
tokens (docs/gpu_measured.md), where a small kernel takes 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MERGED_NUMBERS = 4096  # that a program reads at once
MERGE_WARPS = 4


def merged_splits(head_size: int) -> int:
    """Results of a token and head that are read at once; part of the order of their sums."""
    return max(MERGED_NUMBERS // triton.next_power_of_2(head_size), 1)


@triton.jit
def _merge_splits(
    partials, log_sums, partial_starts, mixed, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (token, head). partials [P, H, D] float32; log_sums [P, H] float32; partial_starts [M + 1] int32; mixed
    [M, H, D], in which a token with fewer than two results stays as it is."""
    token, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(partial_starts + token)
    num_splits = tl.load(partial_starts + token + 1) - begin
    if num_splits > 1:
        sizes = tl.arange(0, BLOCK_D)
        highest, mass = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
        accumulator = tl.zeros([BLOCK_D], tl.float32)
        for first in range(0, num_splits, SPLITS):
            splits = first + tl.arange(0, SPLITS)
            places = (begin + splits).to(tl.int64) * NUM_HEADS + head
            inside = splits < num_splits
            logs = tl.load(log_sums + places, mask=inside, other=float("-inf"))
            cells = places[:, None] * HEAD_SIZE + sizes[None, :]
            parts = tl.load(partials + cells, mask=inside[:, None] & (sizes < HEAD_SIZE)[None, :], other=0.0)
            new_highest = tl.maximum(highest, tl.max(logs, axis=0))
            reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights, shrink = tl.exp2(logs - reference), tl.exp2(highest - reference)
            mass = mass * shrink + tl.sum(weights, axis=0)
            accumulator = accumulator * shrink + tl.sum(parts * weights[:, None], axis=0)
            highest = new_highest
        result = accumulator / tl.where(mass > 0, mass, 1.0)
        place = (token.to(tl.int64) * NUM_HEADS + head) * HEAD_SIZE
        tl.store(mixed + place + sizes, result.to(mixed.dtype.element_ty), mask=sizes < HEAD_SIZE)


def merge_splits(
    partials: torch.Tensor, log_sums: torch.Tensor, partial_starts: torch.Tensor, mixed: torch.Tensor
) -> None:
    """Launch the kernel."""
    num_tokens, num_heads, head_size = mixed.shape
    _merge_splits[(num_tokens, num_heads)](
        partials, log_sums, partial_starts, mixed,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        SPLITS=merged_splits(head_size),
        num_warps=MERGE_WARPS,
    )  # fmt: skip
