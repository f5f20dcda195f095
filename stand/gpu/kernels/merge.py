"""The merge of tree attention: partial results of a token's splits, weighted by the mass that each of them saw."""

from __future__ import annotations

import triton
import triton.language as tl

from stand.gpu.kernels.specimen import Specimen

MERGED_SPLITS = 16  # partial results that the merge holds at once; part of the order of its sums
MERGE_WARPS = 2
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _merge_kernel(
    partials,  # [P, H, D] float32
    log_sums,  # [P, H] float32
    partial_starts,  # [M + 1] int32
    sinks,  # [H], or anything when HAS_SINKS is false
    mixed,  # [M, H, D]
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Partial results of one token and head, weighted by their mass; a sink takes its share and gives nothing."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    sizes = tl.arange(0, BLOCK_D)
    begin = tl.load(partial_starts + token)
    count = tl.load(partial_starts + token + 1) - begin
    highest = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        highest = tl.load(sinks + head + tl.arange(0, 1)).to(tl.float32) * LOG2_E
        mass = tl.full([1], 1.0, tl.float32)
    accumulator = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, count, BLOCK_P):
        splits = first + tl.arange(0, BLOCK_P)
        places = (begin + splits).to(tl.int64) * NUM_HEADS + head
        logs = tl.load(log_sums + places, mask=splits < count, other=float("-inf"))
        filled = logs != float("-inf")
        parts = tl.load(
            partials + places[:, None] * HEAD_SIZE + sizes[None, :],
            mask=filled[:, None] & (sizes < HEAD_SIZE)[None, :],
            other=0.0,
        )
        new_highest = tl.maximum(highest, tl.max(logs, 0))
        reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(logs - reference)
        shrink = tl.exp2(highest - reference)
        mass = mass * shrink + tl.sum(weights, 0)
        accumulator = accumulator * shrink + tl.sum(parts * weights[:, None], 0)
        highest = new_highest
    result = accumulator / tl.where(mass > 0, mass, 1.0)
    place = (token.to(tl.int64) * NUM_HEADS + head) * HEAD_SIZE
    tl.store(mixed + place + sizes, result.to(mixed.dtype.element_ty), mask=sizes < HEAD_SIZE)


def merge(partials, log_sums, partial_starts, sinks, mixed) -> None:
    """Partial results to `mixed`."""
    num_tokens, num_heads, head_size = mixed.shape
    _merge_kernel[(num_tokens, num_heads)](
        partials,
        log_sums,
        partial_starts,
        sinks if sinks is not None else log_sums,
        mixed,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        BLOCK_P=MERGED_SPLITS,
        HAS_SINKS=sinks is not None,
        num_warps=MERGE_WARPS,
    )


def specimens() -> list[Specimen]:
    """Of common models."""
    return [
        _specimen("7B", "bf16", 128, has_sinks=False),
        _specimen("gpt-oss", "bf16", 64, has_sinks=True),
    ]


def _specimen(name: str, dtype: str, head_size: int, *, has_sinks: bool) -> Specimen:
    types = {"partials": "*fp32", "log_sums": "*fp32", "partial_starts": "*i32"}
    types |= {"sinks": f"*{dtype}" if has_sinks else "*fp32", "mixed": f"*{dtype}"}
    constants = {
        "NUM_HEADS": 28,
        "HEAD_SIZE": head_size,
        "BLOCK_D": triton.next_power_of_2(head_size),
        "BLOCK_P": MERGED_SPLITS,
        "HAS_SINKS": has_sinks,
    }
    return Specimen(name, _merge_kernel, types, constants, MERGE_WARPS)
