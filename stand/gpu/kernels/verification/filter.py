"""top_k, top_p and min_p on laws in three launches, by a search for the smallest kept probability instead of a sort.

All chunks of a law are looked at side by side, for their largest key and for what lies above 16 thresholds. Then one
program per law searches for the cut (`cut.py`). Last, all chunks are written.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.verification.cut import (
    NAN_KEY,
    WAYS,
    cut_among,
    cut_by_reading,
    highest_ties,
    interval,
    load_chunk,
    measure_from,
    take_out,
    threshold,
)

CHUNK = 2048  # tokens per program, 16 per thread
CAPACITY = 8192  # keys that the program of a law halves in registers; while an interval has more, the law is read again
FEW = 512  # the same where an interval has no more than these
PAIRS = 64  # no more than these, nearly always: every key is compared with every other one, and nothing is halved
HALVINGS = 30  # of the keys
CUT_WARPS = 8


@triton.jit(do_not_specialize=["first_way"])
def _look(
    laws, largest_keys, counts, masses, row_stride, vocabulary_size, first_way,
    BLOCK: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
):  # fmt: skip
    """Program (law, chunk): the chunk's largest key, and how many tokens and how much mass reach each threshold from
    `first_way` on, and the lowest."""
    law = laws + tl.program_id(0).to(tl.int64) * row_stride
    values, keys, _ = load_chunk(law, tl.program_id(1), vocabulary_size, BLOCK)
    place, largest = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(keys, axis=0)
    tl.store(largest_keys + place, largest)
    if HAS_TOP_P:  # of all tokens, in float64: what top_p is a share of
        tl.store(masses + place * WAYS, tl.sum(tl.where(keys >= 0, values, 0.0).to(tl.float64), axis=0))
    if HAS_TOP_K:
        tl.store(counts + place * WAYS, tl.sum((keys >= 0).to(tl.float32), axis=0))
    for way in range(first_way, WAYS):
        count, mass = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
        if largest >= threshold(way):
            is_above = keys >= threshold(way)
            if HAS_TOP_K:
                count = tl.sum(is_above.to(tl.float32), axis=0)
            if HAS_TOP_P:
                mass = tl.sum(tl.where(is_above, values, 0.0), axis=0)
        if HAS_TOP_K:
            tl.store(counts + place * WAYS + way, count)
        if HAS_TOP_P:
            tl.store(masses + place * WAYS + way, mass.to(tl.float64))


@triton.jit(do_not_specialize=["first_way", "top_k"])
def _find_cut(
    laws, largest_of, counts, masses, taken, cuts, firsts, totals, row_stride, vocabulary_size, first_way, num_chunks,
    top_k, top_p, top_p_rest, min_p, BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, CAPACITY: tl.constexpr,
    FEW: tl.constexpr, PAIRS: tl.constexpr, HALVINGS: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
):  # fmt: skip
    """Program (law): what stays has a key above the cut, or the cut as its key and no id below `first`; its mass."""
    row, chunks = tl.program_id(0), tl.arange(0, BLOCK_CHUNKS)
    law, taken = laws + row.to(tl.int64) * row_stride, taken + row * CAPACITY
    keys = tl.load(largest_of + row * num_chunks + chunks, mask=chunks < num_chunks, other=-1)
    largest = tl.max(keys, axis=0)
    cut, first, total = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.full((), float("nan"), tl.float64)
    if largest != NAN_KEY:
        if HAS_TOP_K or HAS_TOP_P:
            share = tl.full((), top_p, tl.float64) + tl.full((), top_p_rest, tl.float64)
            low, high, num_above, mass = interval(
                counts + row * num_chunks * WAYS, masses + row * num_chunks * WAYS, largest, top_k, share, first_way,
                num_chunks, BLOCK_CHUNKS, HAS_TOP_K, HAS_TOP_P,
            )  # fmt: skip
            count, lowest, highest, above = take_out(
                law, taken, keys, low, high, vocabulary_size, BLOCK, BLOCK_CHUNKS, CAPACITY, False
            )
            if count <= PAIRS:
                cut, share, above, ties = cut_among(
                    taken, count, low, high, num_above, above, mass, top_k, share, PAIRS, PAIRS, HALVINGS, HAS_TOP_K,
                    HAS_TOP_P,
                )  # fmt: skip
            elif count <= FEW:
                cut, share, above, ties = cut_among(
                    taken, count, low, high, num_above, above, mass, top_k, share, FEW, PAIRS, HALVINGS, HAS_TOP_K,
                    HAS_TOP_P,
                )  # fmt: skip
            elif count <= CAPACITY:
                cut, share, above, ties = cut_among(
                    taken, count, low, high, num_above, above, mass, top_k, share, CAPACITY, PAIRS, HALVINGS, HAS_TOP_K,
                    HAS_TOP_P,
                )  # fmt: skip
            else:
                cut, share, above, ties = cut_by_reading(
                    law, taken, keys, low, high, count, lowest, highest, num_above, above, mass, top_k, share,
                    vocabulary_size, BLOCK, BLOCK_CHUNKS, CAPACITY, HALVINGS, HAS_TOP_K, HAS_TOP_P,
                )  # fmt: skip
            value, num_kept = cut.to(tl.float32, bitcast=True).to(tl.float64), ties
            if HAS_TOP_P:
                # the j-th of the ties stays while what is above and j of them are less than the share
                missing = tl.where(cut > 0, tl.ceil((share - above) / tl.where(cut > 0, value, 1.0)), 0.0)
                num_kept = tl.maximum(tl.minimum(missing, ties), 0).to(tl.int32)
                if num_kept < ties:
                    first, num_kept = highest_ties(law, keys, cut, num_kept, vocabulary_size, BLOCK, BLOCK_CHUNKS)
            total = above + num_kept * value
        floor = (min_p * largest.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
        if floor > cut:
            cut, first, total = floor, tl.zeros((), tl.int32), tl.full((), float("nan"), tl.float64)
        if total != total:
            total = measure_from(law, keys, cut, vocabulary_size, BLOCK, BLOCK_CHUNKS, False)
    tl.store(cuts + row, cut)
    tl.store(firsts + row, first)
    tl.store(totals + row, total)


@triton.jit
def _write_chunk(
    laws, largest_keys, cuts, firsts, totals, row_stride, vocabulary_size, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (law, chunk): kept probabilities over the kept mass, 0 for the others."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    law, cut, total = laws + row.to(tl.int64) * row_stride, tl.load(cuts + row), tl.load(totals + row)
    filtered = tl.zeros((BLOCK,), tl.float32)
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    if tl.load(largest_keys + row * tl.num_programs(1) + chunk) >= cut:
        values, keys, _ = load_chunk(law, chunk, vocabulary_size, BLOCK)
        is_kept = (keys > cut) | ((keys == cut) & (tokens >= tl.load(firsts + row)))
        filtered = tl.where(is_kept, tl.math.div_rn(values, total.to(tl.float32)), 0.0)
    filtered = tl.where(total == total, filtered, float("nan"))
    tl.store(law + tokens, filtered, mask=tokens < vocabulary_size)


@torch.library.custom_op("stand::filter_rows", mutates_args=("laws",))
def filter_rows(laws: torch.Tensor, top_k: int, top_p: float, min_p: float) -> None:
    """Filter laws [M, V] float32 in place, as transformers' warpers in this order and a softmax would.

    laws: probabilities (rows that sum to 1 up to rounding), rows contiguous. top_k (0: off) keeps what is not below the
    k-th largest, ties with it included. top_p (1: off) keeps tokens while the mass before them, from the most probable
    down, is below top_p of the mass that top_k left; of equally probable ones those with higher ids come first (a
    stable ascending sort, cut from its start). min_p (0: off) keeps what is not below min_p times the largest. What is
    kept is normalised. A row with NaN becomes NaN throughout.
    """
    _check_arguments(laws, top_k, top_p, min_p)
    num_rows, vocabulary_size = laws.shape
    grid = (num_rows, triton.cdiv(vocabulary_size, CHUNK))
    largest_keys = laws.new_empty(grid, dtype=torch.int32)
    has_top_k, has_top_p = 0 < top_k < vocabulary_size, top_p < 1
    counts = laws.new_empty((*grid, WAYS.value)) if has_top_k else laws  # laws: not read
    masses = laws.new_empty((*grid, WAYS.value), dtype=torch.float64) if has_top_p else laws
    taken = laws.new_empty((num_rows, CAPACITY), dtype=torch.int32)
    cuts, firsts = laws.new_empty((2, num_rows), dtype=torch.int32)
    totals = laws.new_empty(num_rows, dtype=torch.float64)
    rounded, first_way = float(np.float32(top_p)), 1 if has_top_k else first_doubtful_way(vocabulary_size, top_p)
    sizes = (laws.stride(0), vocabulary_size, first_way)
    flags = {"BLOCK": CHUNK, "HAS_TOP_K": has_top_k, "HAS_TOP_P": has_top_p}
    with launch_device(_look, laws):
        _look[grid](laws, largest_keys, counts, masses, *sizes, **flags, num_warps=4)
        _find_cut[(num_rows,)](
            laws, largest_keys, counts, masses, taken, cuts, firsts, totals, *sizes, grid[1], top_k, rounded,
            top_p - rounded, min_p, **flags, BLOCK_CHUNKS=triton.next_power_of_2(grid[1]), CAPACITY=CAPACITY, FEW=FEW,
            PAIRS=PAIRS, HALVINGS=HALVINGS, num_warps=CUT_WARPS,
        )  # fmt: skip
        _write_chunk[grid](laws, largest_keys, cuts, firsts, totals, *sizes[:2], BLOCK=CHUNK, num_warps=4)


def first_doubtful_way(vocabulary_size: int, top_p: float) -> int:
    """The first threshold that top_p's cut may lie below. All tokens below a lower one have no more mass together than
    top_p leaves out, by their number: below 2^-22 for 151,936 tokens and 0.95."""
    ways = range(1, WAYS.value)
    return next((way for way in ways if vocabulary_size * 2.0 ** (2 * way - 32) > 0.99 * (1 - top_p)), WAYS.value)


@filter_rows.register_fake
def _(laws: torch.Tensor, top_k: int, top_p: float, min_p: float) -> None:
    return None


def _check_arguments(laws: torch.Tensor, top_k: int, top_p: float, min_p: float) -> None:
    if laws.ndim != 2 or laws.dtype != torch.float32 or laws.stride(1) != 1:
        raise ValueError(
            f"filter_rows needs [M, V] in float32 with contiguous rows, got {list(laws.shape)} in {laws.dtype} with "
            f"strides {laws.stride()}; convert it first"
        )
    if not (top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1):
        raise ValueError(
            f"top_k must be >= 0, top_p in (0, 1], min_p in [0, 1], got {top_k}, {top_p} and {min_p}; "
            "0, 1 and 0 switch them off"
        )
