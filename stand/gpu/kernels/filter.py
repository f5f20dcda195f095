"""top_k, top_p and min_p on laws in three launches, by a search for the smallest kept probability instead of a sort.

Non-negative floats order like their bits, so a probability is a 30-bit integer key (below 2.0). All chunks of a law are
looked at side by side, for their largest key and for what lies above 16 thresholds. Then one program per law, which
reads the chunks with keys above the interval that is left, once, takes the keys of the interval out and halves it until
it is one key. Last, all chunks are written. Decisions rest on sums in float64 in a fixed order, without atomics: equal
input gives equal bits, whatever the batch mates.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.specimen import Specimen

CHUNK = 2048  # tokens per program, 16 per thread
CAPACITY = 8192  # keys that the program of a law halves in registers; while an interval has more, the law is read again
FEW = 512  # the same where an interval has no more than these: nearly always
HALVINGS = 30  # of the keys
CUT_WARPS = 8
WAYS = tl.constexpr(16)  # thresholds: 0, then every fourth of a probability from 2^-30 to 2^-2
MARGIN = tl.constexpr(1e-5)  # rounding of the first look, which is in float32, is far below
NAN_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _threshold(way):
    """The key of a way's threshold."""
    return tl.where(way == 0, 0, (95 + 2 * way) << 23)


@triton.jit
def _load_chunk(law, chunk, vocabulary_size, BLOCK: tl.constexpr):
    """(values, keys, tokens) of a chunk; NaN has the largest key, what is beyond the vocabulary a negative one."""
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(law + tokens, mask=tokens < vocabulary_size, other=-1.0)
    return values, tl.where(values == values, values.to(tl.int32, bitcast=True), NAN_KEY), tokens


@triton.jit
def _look(
    laws, largest_keys, counts, masses, row_stride, vocabulary_size,
    BLOCK: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
):  # fmt: skip
    """Program (law, chunk): the chunk's largest key, and how many tokens and how much mass reach each threshold."""
    law = laws + tl.program_id(0).to(tl.int64) * row_stride
    values, keys, _ = _load_chunk(law, tl.program_id(1), vocabulary_size, BLOCK)
    place, largest = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(keys, axis=0)
    tl.store(largest_keys + place, largest)
    if HAS_TOP_P:  # of all tokens, in float64: what top_p is a share of
        tl.store(masses + place * WAYS, tl.sum(tl.where(keys >= 0, values, 0.0).to(tl.float64), axis=0))
    if HAS_TOP_K:
        tl.store(counts + place * WAYS, tl.sum((keys >= 0).to(tl.float32), axis=0))
    for way in range(1, WAYS):
        count, mass = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
        if largest >= _threshold(way):
            is_above = keys >= _threshold(way)
            if HAS_TOP_K:
                count = tl.sum(is_above.to(tl.float32), axis=0)
            if HAS_TOP_P:
                mass = tl.sum(tl.where(is_above, values, 0.0), axis=0)
        if HAS_TOP_K:
            tl.store(counts + place * WAYS + way, count)
        if HAS_TOP_P:
            tl.store(masses + place * WAYS + way, mass.to(tl.float64))


@triton.jit
def _measure(values, is_measured, BY_COUNT: tl.constexpr):
    """Number or mass of some tokens, float64."""
    if BY_COUNT:
        return tl.sum(is_measured.to(tl.int32), axis=0).to(tl.float64)
    else:
        return tl.sum(tl.where(is_measured, values.to(tl.float64), 0.0), axis=0)


@triton.jit
def _next_chunk(largest_keys, least, chunk, BLOCK_CHUNKS: tl.constexpr):
    """The first chunk behind `chunk` with a key of `least` or more; BLOCK_CHUNKS if there is none."""
    chunks = tl.arange(0, BLOCK_CHUNKS)
    return tl.min(tl.where((largest_keys >= least) & (chunks > chunk), chunks, BLOCK_CHUNKS), axis=0)


@triton.jit
def _measure_from(
    law, largest_keys, least, vocabulary_size,
    BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BY_COUNT: tl.constexpr,
):  # fmt: skip
    """Number or mass of a law's tokens with keys of `least` or more."""
    total, chunk = tl.zeros((), tl.float64), _next_chunk(largest_keys, least, -1, BLOCK_CHUNKS)
    while chunk < BLOCK_CHUNKS:
        values, keys, _ = _load_chunk(law, chunk, vocabulary_size, BLOCK)
        total += _measure(values, keys >= least, BY_COUNT)
        chunk = _next_chunk(largest_keys, least, chunk, BLOCK_CHUNKS)
    return total


@triton.jit
def _take_out(
    law, taken, largest_keys, low, high, vocabulary_size,
    BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, CAPACITY: tl.constexpr, BY_COUNT: tl.constexpr,
):  # fmt: skip
    """(how many keys lie in [low, high), the lowest and the highest of them, measure of those above).

    Keys of the interval go to `taken`, as far as there is room. Barriers: other lanes have read it before, and read it
    afterwards.
    """
    tl.debug_barrier()
    count, above, lowest, highest = tl.zeros((), tl.int32), tl.zeros((), tl.float64), high, low
    chunk = _next_chunk(largest_keys, low, -1, BLOCK_CHUNKS)
    while chunk < BLOCK_CHUNKS:
        values, keys, _ = _load_chunk(law, chunk, vocabulary_size, BLOCK)
        above += _measure(values, keys >= high, BY_COUNT)
        is_inside = (keys >= low) & (keys < high)
        rank = count + tl.cumsum(is_inside.to(tl.int32), axis=0) - 1
        tl.store(taken + rank, keys, mask=is_inside & (rank < CAPACITY))
        count += tl.sum(is_inside.to(tl.int32), axis=0)
        lowest = tl.minimum(lowest, tl.min(tl.where(is_inside, keys, high), axis=0))
        highest = tl.maximum(highest, tl.max(tl.where(is_inside, keys, low), axis=0))
        chunk = _next_chunk(largest_keys, low, chunk, BLOCK_CHUNKS)
    tl.debug_barrier()
    return count, lowest, highest, above


@triton.jit
def _halve(
    taken, count, low, high, above, target, ROOM: tl.constexpr, HALVINGS: tl.constexpr, BY_COUNT: tl.constexpr
):  # fmt: skip
    """The largest key of [low, high) that has the target at or above it, by the keys taken out; `low` if none has."""
    places = tl.arange(0, ROOM)
    keys = tl.load(taken + places, mask=places < count, other=-1)
    values, cut = keys.to(tl.float32, bitcast=True), low
    for step in range(0, HALVINGS):
        higher = cut + (1 << (29 - step))
        if higher < high:
            measure = above + _measure(values, keys >= higher, BY_COUNT)
            cut = tl.where(measure >= target, higher, cut)
    return cut


@triton.jit
def _interval(
    counts, masses, largest, top_k, top_p, num_chunks,
    BLOCK_CHUNKS: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
):  # fmt: skip
    """(low, high, how many keys reach high, mass of the law): both filters' cuts lie in [low, high)."""
    chunks, ways = tl.arange(0, BLOCK_CHUNKS), tl.arange(0, WAYS)
    cells, is_chunk = chunks[:, None] * WAYS + ways[None, :], chunks[:, None] < num_chunks
    low_way, high_way = tl.zeros((), tl.int32), tl.full((), WAYS, tl.int32)
    num_above, total = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    if HAS_TOP_K:
        count = tl.sum(tl.load(counts + cells, mask=is_chunk, other=0.0), axis=0)  # whole numbers, exact
        low_way = tl.max(tl.where(count >= top_k, ways, 0), axis=0)
        high_way = tl.min(tl.where(count < top_k, ways, WAYS), axis=0)
    if HAS_TOP_P:
        mass = tl.sum(tl.load(masses + cells, mask=is_chunk, other=0.0), axis=0)
        total = tl.sum(tl.where(ways == 0, mass, 0.0), axis=0)
        if HAS_TOP_K:  # leaves at least what reaches its own high way, so the cut of top_p has no less above it
            share = top_p * tl.sum(tl.where(ways == high_way, mass, 0.0), axis=0)
            high_way = tl.maximum(high_way, tl.min(tl.where(mass < share * (1 - MARGIN), ways, WAYS), axis=0))
        else:
            low_way = tl.max(tl.where(mass >= top_p * total * (1 + MARGIN), ways, 0), axis=0)
            high_way = tl.min(tl.where(mass < top_p * total * (1 - MARGIN), ways, WAYS), axis=0)
    if HAS_TOP_K:
        num_above = tl.sum(tl.where(ways == high_way, count, 0.0), axis=0).to(tl.float64)
    high = tl.where(high_way < WAYS, _threshold(high_way), largest + 1)
    return _threshold(low_way), high, num_above, total


@triton.jit
def _cut_among(
    taken, count, low, high, num_above, mass_above, total, top_k, top_p,
    ROOM: tl.constexpr, HALVINGS: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
):  # fmt: skip
    """(cut, top_p's share, mass above the cut, how many keys equal it), all keys of [low, high) being taken out."""
    places = tl.arange(0, ROOM)
    keys = tl.load(taken + places, mask=places < count, other=-1)
    values, cut, share = keys.to(tl.float32, bitcast=True), low, total
    if HAS_TOP_K:
        cut = _halve(taken, count, cut, high, num_above, top_k.to(tl.float64), ROOM, HALVINGS, True)
        share = mass_above + _measure(values, keys >= cut, False)
    if HAS_TOP_P:
        share *= top_p
        cut = _halve(taken, count, cut, high, mass_above, share, ROOM, HALVINGS, False)
    ties = tl.sum((keys == cut).to(tl.int32), axis=0)
    return cut, share, mass_above + _measure(values, keys > cut, False), ties


@triton.jit
def _search(
    law, taken, largest_keys, low, high, count, lowest, highest, above, target, vocabulary_size,
    BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, CAPACITY: tl.constexpr, FEW: tl.constexpr,
    HALVINGS: tl.constexpr, BY_COUNT: tl.constexpr,
):  # fmt: skip
    """The largest key of [low, high) that has the target (a number of tokens or a mass) at or above it.

    count, lowest, highest, above: what `_take_out` said of the interval.
    """
    while (count > CAPACITY) & (highest > lowest):  # the key looked for is one of the interval's
        low, high, middle = lowest, highest + 1, lowest + (highest - lowest + 1) // 2
        is_reached = _measure_from(law, largest_keys, middle, vocabulary_size, BLOCK, BLOCK_CHUNKS, BY_COUNT) >= target
        low, high = tl.where(is_reached, middle, low), tl.where(is_reached, high, middle)
        count, lowest, highest, above = _take_out(
            law, taken, largest_keys, low, high, vocabulary_size, BLOCK, BLOCK_CHUNKS, CAPACITY, BY_COUNT
        )
    if count > CAPACITY:
        cut = lowest
    elif count <= FEW:
        cut = _halve(taken, count, low, high, above, target, FEW, HALVINGS, BY_COUNT)
    else:
        cut = _halve(taken, count, low, high, above, target, CAPACITY, HALVINGS, BY_COUNT)
    return cut


@triton.jit
def _cut_by_reading(
    law, taken, largest_keys, low, high, count, lowest, highest, num_above, mass_above, total, top_k, top_p,
    vocabulary_size, BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, CAPACITY: tl.constexpr, FEW: tl.constexpr,
    HALVINGS: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
):  # fmt: skip
    """As `_cut_among`, where [low, high) has more keys than there is room for; ties are not counted."""
    cut, share, above = low, total, tl.full((), float("nan"), tl.float64)
    if HAS_TOP_K:
        cut = _search(
            law, taken, largest_keys, low, high, count, lowest, highest, num_above, top_k.to(tl.float64),
            vocabulary_size, BLOCK, BLOCK_CHUNKS, CAPACITY, FEW, HALVINGS, True,
        )  # fmt: skip
    if HAS_TOP_P:
        if HAS_TOP_K:
            share = _measure_from(law, largest_keys, cut, vocabulary_size, BLOCK, BLOCK_CHUNKS, False)
            count, lowest, highest, mass_above = _take_out(
                law, taken, largest_keys, cut, high, vocabulary_size, BLOCK, BLOCK_CHUNKS, CAPACITY, False
            )
        share *= top_p
        cut = _search(
            law, taken, largest_keys, cut, high, count, lowest, highest, mass_above, share, vocabulary_size,
            BLOCK, BLOCK_CHUNKS, CAPACITY, FEW, HALVINGS, False,
        )  # fmt: skip
        above = _measure_from(law, largest_keys, cut + 1, vocabulary_size, BLOCK, BLOCK_CHUNKS, False)
    return cut, share, above, vocabulary_size + 1


@triton.jit
def _highest_ties(
    law, largest_keys, cut, num_kept, vocabulary_size, BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr
):  # fmt: skip
    """(the first of the `num_kept` highest tokens whose key is the cut, how many these are)."""
    chunks, missing, first = tl.arange(0, BLOCK_CHUNKS), num_kept, tl.where(num_kept > 0, 0, vocabulary_size)
    chunk = tl.max(tl.where(largest_keys >= cut, chunks, -1), axis=0)
    while (chunk >= 0) & (missing > 0):
        _, keys, tokens = _load_chunk(law, chunk, vocabulary_size, BLOCK)
        is_tie = (keys == cut).to(tl.int32)
        count = tl.sum(is_tie, axis=0)
        later = count - tl.cumsum(is_tie, axis=0)  # ties behind each token
        if count >= missing:
            first = tl.min(tl.where((is_tie > 0) & (later < missing), tokens, vocabulary_size), axis=0)
        missing -= tl.minimum(count, missing)
        chunk = tl.max(tl.where((largest_keys >= cut) & (chunks < chunk), chunks, -1), axis=0)
    return first, num_kept - missing


@triton.jit(do_not_specialize=["top_k"])
def _find_cut(
    laws, largest_of, counts, masses, taken, cuts, firsts, totals, row_stride, vocabulary_size, num_chunks,
    top_k, top_p, top_p_rest, min_p, BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, CAPACITY: tl.constexpr,
    FEW: tl.constexpr, HALVINGS: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
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
            low, high, num_above, mass = _interval(
                counts + row * num_chunks * WAYS, masses + row * num_chunks * WAYS, largest, top_k, share, num_chunks,
                BLOCK_CHUNKS, HAS_TOP_K, HAS_TOP_P,
            )  # fmt: skip
            count, lowest, highest, above = _take_out(
                law, taken, keys, low, high, vocabulary_size, BLOCK, BLOCK_CHUNKS, CAPACITY, False
            )
            if count <= FEW:
                cut, share, above, ties = _cut_among(
                    taken, count, low, high, num_above, above, mass, top_k, share, FEW, HALVINGS, HAS_TOP_K, HAS_TOP_P
                )
            elif count <= CAPACITY:
                cut, share, above, ties = _cut_among(
                    taken, count, low, high, num_above, above, mass, top_k, share, CAPACITY, HALVINGS, HAS_TOP_K,
                    HAS_TOP_P,
                )  # fmt: skip
            else:
                cut, share, above, ties = _cut_by_reading(
                    law, taken, keys, low, high, count, lowest, highest, num_above, above, mass, top_k, share,
                    vocabulary_size, BLOCK, BLOCK_CHUNKS, CAPACITY, FEW, HALVINGS, HAS_TOP_K, HAS_TOP_P,
                )  # fmt: skip
            value, num_kept = cut.to(tl.float32, bitcast=True).to(tl.float64), ties
            if HAS_TOP_P:
                # the j-th of the ties stays while what is above and j of them are less than the share
                missing = tl.where(cut > 0, tl.ceil((share - above) / tl.where(cut > 0, value, 1.0)), 0.0)
                num_kept = tl.maximum(tl.minimum(missing, ties), 0).to(tl.int32)
                if num_kept < ties:
                    first, num_kept = _highest_ties(law, keys, cut, num_kept, vocabulary_size, BLOCK, BLOCK_CHUNKS)
            total = above + num_kept * value
        floor = (min_p * largest.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
        if floor > cut:
            cut, first = floor, tl.zeros((), tl.int32)
        if (total != total) | (floor == cut):
            total = _measure_from(law, keys, cut, vocabulary_size, BLOCK, BLOCK_CHUNKS, False)
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
        values, keys, _ = _load_chunk(law, chunk, vocabulary_size, BLOCK)
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
    sizes, rounded = (laws.stride(0), vocabulary_size), float(np.float32(top_p))
    flags = {"BLOCK": CHUNK, "HAS_TOP_K": has_top_k, "HAS_TOP_P": has_top_p}
    with launch_device(_look, laws):
        _look[grid](laws, largest_keys, counts, masses, *sizes, **flags, num_warps=4)
        _find_cut[(num_rows,)](
            laws, largest_keys, counts, masses, taken, cuts, firsts, totals, *sizes, grid[1], top_k, rounded,
            top_p - rounded, min_p, **flags, BLOCK_CHUNKS=triton.next_power_of_2(grid[1]), CAPACITY=CAPACITY, FEW=FEW,
            HALVINGS=HALVINGS, num_warps=CUT_WARPS,
        )  # fmt: skip
        _write_chunk[grid](laws, largest_keys, cuts, firsts, totals, *sizes, BLOCK=CHUNK, num_warps=4)


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


def specimens() -> list[Specimen]:
    """The kernels as launched for 152,064 tokens (75 chunks)."""
    laws, sizes = {"laws": "*fp32", "largest_keys": "*i32"}, {"row_stride": "i32", "vocabulary_size": "i32"}
    seen, found = {"counts": "*fp32", "masses": "*fp64"}, {"cuts": "*i32", "firsts": "*i32", "totals": "*fp64"}
    chosen = {"num_chunks": "i32", "top_k": "i32", "top_p": "fp32", "top_p_rest": "fp32", "min_p": "fp32"}
    cut = {"laws": "*fp32", "largest_of": "*i32", **seen, "taken": "*i32", **found, **sizes, **chosen}
    blocks = {"BLOCK": CHUNK, "BLOCK_CHUNKS": 128, "CAPACITY": CAPACITY, "FEW": FEW, "HALVINGS": HALVINGS}
    cases = []
    for name, has_top_k, has_top_p in (("top_k", True, False), ("top_p", False, True), ("both", True, True)):
        flags = {"HAS_TOP_K": has_top_k, "HAS_TOP_P": has_top_p}
        cases.append(Specimen(f"look_{name}", _look, {**laws, **seen, **sizes}, {"BLOCK": CHUNK, **flags}))
        cases.append(Specimen(f"find_cut_{name}", _find_cut, cut, {**blocks, **flags}, num_warps=CUT_WARPS))
    return [*cases, Specimen("write_chunk", _write_chunk, {**laws, **found, **sizes}, {"BLOCK": CHUNK})]
