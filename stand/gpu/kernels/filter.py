"""top_k, top_p and min_p on laws, by a search for the smallest kept probability instead of a sort.

Non-negative floats order like their bits, so a probability is a 30-bit integer key (below 2.0). Every pass measures,
per row and chunk, what lies at or above 16 or 32 thresholds, and keeps the interval that holds the answer; after seven
passes it is one key. A chunk whose largest key is below the interval is not read again: of a peaked law, nearly all.
Sums are in float64 and in a fixed order, without atomics: equal input gives equal bits, whatever the batch mates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.specimen import Specimen

CHUNK = 2048  # tokens per program, 16 per thread
BITS = (4, 4, 4, 4, 4, 5, 5)  # of the key, found per pass; more per pass cost more sums, fewer cost launches
KEY_BITS = sum(BITS)
NAN_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _load_chunk(laws, row_stride, vocabulary_size, BLOCK: tl.constexpr):
    """(values, keys) of the program's chunk; NaN has the largest key, what is beyond the vocabulary a negative one."""
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = laws + tl.program_id(0).to(tl.int64) * row_stride + tokens
    values = tl.load(place, mask=tokens < vocabulary_size, other=-1.0)
    return values, tl.where(values == values, values.to(tl.int32, bitcast=True), NAN_KEY)


@triton.jit
def _largest_in_chunk(laws, largest_keys, row_stride, vocabulary_size, BLOCK: tl.constexpr):
    """Program (row, chunk): the chunk's largest key."""
    _, keys = _load_chunk(laws, row_stride, vocabulary_size, BLOCK)
    tl.store(largest_keys + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(keys, axis=0))


@triton.jit
def _measure_chunk(
    laws, largest_keys, cuts, measures, row_stride, vocabulary_size, shift,
    BLOCK: tl.constexpr, WAYS: tl.constexpr, BY_COUNT: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): tokens (or mass) with key >= cut + way * 2**shift, for every way."""
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    cut = tl.load(cuts + tl.program_id(0))
    if tl.load(largest_keys + place) >= cut:
        values, keys = _load_chunk(laws, row_stride, vocabulary_size, BLOCK)
        masses = values.to(tl.float64)
        for way in range(0, WAYS):
            is_above = keys >= cut + (way << shift)
            if BY_COUNT:
                measure = tl.sum(is_above.to(tl.int32), axis=0).to(tl.float64)
            else:
                measure = tl.sum(tl.where(is_above, masses, 0.0), axis=0)
            tl.store(measures + place * WAYS + way, measure)
    else:
        tl.store(measures + place * WAYS + tl.arange(0, WAYS), tl.zeros((WAYS,), tl.float64))


@triton.jit
def _narrow(
    cuts, targets, measures, num_chunks, shift,
    BLOCK_CHUNKS: tl.constexpr, WAYS: tl.constexpr, IS_SHARE: tl.constexpr,
):  # fmt: skip
    """Program (row): raise the cut to the last threshold that still has the target at or above it.

    IS_SHARE: the target is a share of what lies at or above the cut, and is replaced by that amount.
    """
    row = tl.program_id(0)
    ways, chunks = tl.arange(0, WAYS), tl.arange(0, BLOCK_CHUNKS)
    places = (row * num_chunks + chunks[:, None]) * WAYS + ways[None, :]
    measure = tl.sum(tl.load(measures + places, mask=chunks[:, None] < num_chunks, other=0.0), axis=0)
    target = tl.load(targets + row)
    if IS_SHARE:
        target *= tl.sum(tl.where(ways == 0, measure, 0.0), axis=0)
        tl.store(targets + row, target)
    way = tl.max(tl.where(measure >= target, ways, 0), axis=0)
    tl.store(cuts + row, tl.load(cuts + row) + (way << shift))


@triton.jit
def _floor_key(largest_keys, num_chunks, min_p, BLOCK_CHUNKS: tl.constexpr):
    """The key of min_p times the row's largest probability."""
    chunks = tl.arange(0, BLOCK_CHUNKS)
    keys = tl.load(largest_keys + tl.program_id(0) * num_chunks + chunks, mask=chunks < num_chunks, other=0)
    return (min_p * tl.max(keys, axis=0).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)


@triton.jit
def _tally_chunk(
    laws, largest_keys, cuts, masses, ties, row_stride, vocabulary_size, min_p,
    BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the mass above the cut, and the number of tokens at it, as far as min_p leaves them."""
    num_chunks = tl.num_programs(1)
    place = tl.program_id(0) * num_chunks + tl.program_id(1)
    cut = tl.load(cuts + tl.program_id(0))
    floor = _floor_key(largest_keys, num_chunks, min_p, BLOCK_CHUNKS)
    mass, num_ties = tl.zeros((), tl.float64), tl.zeros((), tl.int32)
    if tl.load(largest_keys + place) >= tl.maximum(cut, floor):
        values, keys = _load_chunk(laws, row_stride, vocabulary_size, BLOCK)
        mass = tl.sum(tl.where((keys > cut) & (keys >= floor), values.to(tl.float64), 0.0), axis=0)
        num_ties = tl.sum(((keys == cut) & (keys >= floor)).to(tl.int32), axis=0)
    tl.store(masses + place, mass)
    tl.store(ties + place, num_ties)


@triton.jit
def _merge_chunks(cut, targets, masses, ties, num_chunks, BLOCK_CHUNKS: tl.constexpr):
    """(kept mass of the row, number of its ties that stay, ties in chunks behind the program's).

    Ties fill up what the mass above leaves of the target: the j-th stays while mass + j * value < target.
    """
    row, chunks = tl.program_id(0), tl.arange(0, BLOCK_CHUNKS)
    is_chunk, places = chunks < num_chunks, row * num_chunks + chunks
    mass = tl.sum(tl.load(masses + places, mask=is_chunk, other=0.0), axis=0)
    ties_of = tl.load(ties + places, mask=is_chunk, other=0)
    value = cut.to(tl.float32, bitcast=True).to(tl.float64)
    missing = tl.ceil((tl.load(targets + row) - mass) / value)
    num_kept = tl.minimum(missing, tl.sum(ties_of, axis=0).to(tl.float64))
    later = tl.sum(tl.where(chunks > tl.program_id(1), ties_of, 0), axis=0)
    return mass + num_kept * value, num_kept, later


@triton.jit
def _write_chunk(
    laws, largest_keys, cuts, targets, masses, ties, row_stride, vocabulary_size, min_p,
    BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): kept probabilities over the kept mass, 0 for the others."""
    row, num_chunks = tl.program_id(0), tl.num_programs(1)
    cut = tl.load(cuts + row)
    floor = _floor_key(largest_keys, num_chunks, min_p, BLOCK_CHUNKS)
    total, num_kept, later = _merge_chunks(cut, targets, masses, ties, num_chunks, BLOCK_CHUNKS)
    filtered = tl.zeros((BLOCK,), tl.float32)
    if tl.load(largest_keys + row * num_chunks + tl.program_id(1)) >= tl.maximum(cut, floor):
        values, keys = _load_chunk(laws, row_stride, vocabulary_size, BLOCK)
        is_tie = keys == cut  # below the floor, none were counted and none stay
        ties_here = is_tie.to(tl.int32)
        rank = later + tl.sum(ties_here, axis=0) - tl.cumsum(ties_here, axis=0)  # ties with higher ids
        is_kept = ((keys > cut) & (keys >= floor)) | (is_tie & (rank.to(tl.float64) < num_kept))
        filtered = tl.where(is_kept, tl.math.div_rn(values, total.to(tl.float32)), 0.0)
    filtered = tl.where(total == total, filtered, float("nan"))
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(laws + row.to(tl.int64) * row_stride + tokens, filtered, mask=tokens < vocabulary_size)


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
    cuts = laws.new_zeros(num_rows, dtype=torch.int32)
    targets = laws.new_full((num_rows,), float("inf"), dtype=torch.float64)  # ties stay, however many
    with launch_device(_largest_in_chunk, laws):
        _largest_in_chunk[grid](laws, largest_keys, laws.stride(0), vocabulary_size, BLOCK=CHUNK, num_warps=4)
        if 0 < top_k < vocabulary_size:
            _search(laws, largest_keys, cuts, torch.full_like(targets, top_k), by_count=True)
        if top_p < 1:
            targets = torch.full_like(targets, top_p)
            _search(laws, largest_keys, cuts, targets, by_count=False)
        _write(laws, largest_keys, cuts, targets, min_p)


@filter_rows.register_fake
def _(laws: torch.Tensor, top_k: int, top_p: float, min_p: float) -> None:
    return None


def _search(
    laws: torch.Tensor, largest_keys: torch.Tensor, cuts: torch.Tensor, targets: torch.Tensor, *, by_count: bool
) -> None:
    """Raise each row's cut to the largest key that has the target at or above it.

    The target is a number of tokens, or a share of the mass at or above the cut, which becomes that mass.
    """
    num_chunks = largest_keys.shape[1]
    measures = laws.new_empty((*largest_keys.shape, 2 ** max(BITS)), dtype=torch.float64)
    shift = KEY_BITS
    for turn, bits in enumerate(BITS):
        shift -= bits
        _measure_chunk[tuple(largest_keys.shape)](
            laws, largest_keys, cuts, measures, laws.stride(0), laws.shape[1], shift,
            BLOCK=CHUNK, WAYS=2**bits, BY_COUNT=by_count, num_warps=4,
        )  # fmt: skip
        _narrow[(len(cuts),)](
            cuts, targets, measures, num_chunks, shift, BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
            WAYS=2**bits, IS_SHARE=turn == 0 and not by_count, num_warps=4,
        )  # fmt: skip


def _write(
    laws: torch.Tensor, largest_keys: torch.Tensor, cuts: torch.Tensor, targets: torch.Tensor, min_p: float
) -> None:
    """Write the laws, given each row's cut, and the mass that its ties fill up."""
    masses = torch.empty_like(largest_keys, dtype=torch.float64)
    ties = torch.empty_like(largest_keys)
    blocks = {"BLOCK": CHUNK, "BLOCK_CHUNKS": triton.next_power_of_2(largest_keys.shape[1]), "num_warps": 4}
    sizes = {"row_stride": laws.stride(0), "vocabulary_size": laws.shape[1], "min_p": min_p}
    grid = tuple(largest_keys.shape)
    _tally_chunk[grid](laws, largest_keys, cuts, masses, ties, **sizes, **blocks)
    _write_chunk[grid](laws, largest_keys, cuts, targets, masses, ties, **sizes, **blocks)


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


def specimens() -> list[Specimen]:
    """The kernels as launched for 152,064 tokens (75 chunks)."""
    laws, keys = {"laws": "*fp32", "largest_keys": "*i32"}, {"cuts": "*i32", "targets": "*fp64"}
    sizes = {"row_stride": "i32", "vocabulary_size": "i32"}
    measure = {**laws, "cuts": "*i32", "measures": "*fp64", **sizes, "shift": "i32"}
    narrow = {**keys, "measures": "*fp64", "num_chunks": "i32", "shift": "i32"}
    tally = {**laws, "cuts": "*i32", "masses": "*fp64", "ties": "*i32", **sizes, "min_p": "fp32"}
    blocks = {"BLOCK": CHUNK, "BLOCK_CHUNKS": 128}
    found = [Specimen("largest_in_chunk", _largest_in_chunk, {**laws, **sizes}, {"BLOCK": CHUNK})]
    for ways in sorted({2**bits for bits in BITS}):
        for by_count in (False, True):
            name, constants = f"{'count' if by_count else 'mass'}_{ways}", {"WAYS": ways, "BY_COUNT": by_count}
            found.append(Specimen(f"measure_{name}", _measure_chunk, measure, {"BLOCK": CHUNK, **constants}))
        for is_share in (False, True):
            constants = {"BLOCK_CHUNKS": 128, "WAYS": ways, "IS_SHARE": is_share}
            found.append(Specimen(f"narrow_{ways}{'_share' if is_share else ''}", _narrow, narrow, constants))
    return [
        *found,
        Specimen("tally_chunk", _tally_chunk, tally, blocks),
        Specimen("write_chunk", _write_chunk, {**tally, "targets": "*fp64"}, blocks),
    ]
