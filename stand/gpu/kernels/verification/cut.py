"""The smallest kept probability of a law under top_k and top_p, searched by one program and without a sort.

Non-negative floats order like their bits, so a probability is a 30-bit integer key (below 2.0). `filter.py` has looked
at all chunks of the law, for their largest key and for what lies above 16 thresholds. The program reads the chunks with
keys above the interval that is left, once, and takes the keys of the interval out. Of a few of them each is compared
with every other one; else the interval is halved until it is one key. Decisions rest on sums in float64 in a fixed
order, without atomics: equal input gives equal bits, whatever the batch mates.
"""

from __future__ import annotations

import triton
import triton.language as tl

WAYS = tl.constexpr(16)  # thresholds: 0, then every fourth of a probability from 2^-30 to 2^-2
MARGIN = tl.constexpr(1e-5)  # rounding of the first look, which is in float32, is far below
NAN_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def threshold(way):
    """The key of a way's threshold."""
    return tl.where(way == 0, 0, (95 + 2 * way) << 23)


@triton.jit
def load_chunk(law, chunk, vocabulary_size, BLOCK: tl.constexpr):
    """(values, keys, tokens) of a chunk; NaN has the largest key, what is beyond the vocabulary a negative one."""
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(law + tokens, mask=tokens < vocabulary_size, other=-1.0)
    return values, tl.where(values == values, values.to(tl.int32, bitcast=True), NAN_KEY), tokens


@triton.jit
def _measures(values, is_measured, BY_COUNT: tl.constexpr):
    """1 or the probability of some tokens, 0 of others, float64."""
    if BY_COUNT:
        return is_measured.to(tl.float64)
    else:
        return tl.where(is_measured, values.to(tl.float64), 0.0)


@triton.jit
def _measure(values, is_measured, BY_COUNT: tl.constexpr):
    """Number or mass of some tokens, float64."""
    return tl.sum(_measures(values, is_measured, BY_COUNT), axis=0)


@triton.jit
def _next_chunk(largest_keys, least, chunk, BLOCK_CHUNKS: tl.constexpr):
    """The first chunk behind `chunk` with a key of `least` or more; BLOCK_CHUNKS if there is none."""
    chunks = tl.arange(0, BLOCK_CHUNKS)
    return tl.min(tl.where((largest_keys >= least) & (chunks > chunk), chunks, BLOCK_CHUNKS), axis=0)


@triton.jit
def measure_from(
    law, largest_keys, least, vocabulary_size,
    BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BY_COUNT: tl.constexpr,
):  # fmt: skip
    """Number or mass of a law's tokens with keys of `least` or more."""
    totals, chunk = tl.zeros((BLOCK,), tl.float64), _next_chunk(largest_keys, least, -1, BLOCK_CHUNKS)
    while chunk < BLOCK_CHUNKS:
        values, keys, _ = load_chunk(law, chunk, vocabulary_size, BLOCK)
        totals += _measures(values, keys >= least, BY_COUNT)
        chunk = _next_chunk(largest_keys, least, chunk, BLOCK_CHUNKS)
    return tl.sum(totals, axis=0)


@triton.jit
def take_out(
    law, taken, largest_keys, low, high, vocabulary_size,
    BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, CAPACITY: tl.constexpr, BY_COUNT: tl.constexpr,
):  # fmt: skip
    """(how many keys lie in [low, high), the lowest and the highest of them, measure of those above).

    Keys of the interval go to `taken`, as far as there is room. Barriers: other lanes have read it before, and read it
    afterwards.
    """
    tl.debug_barrier()
    count, above = tl.zeros((), tl.int32), tl.zeros((BLOCK,), tl.float64)  # in places of a chunk, summed at the end
    lowest, highest = tl.full((BLOCK,), 0, tl.int32) + high, tl.full((BLOCK,), 0, tl.int32) + low
    chunk = _next_chunk(largest_keys, low, -1, BLOCK_CHUNKS)
    while chunk < BLOCK_CHUNKS:
        values, keys, _ = load_chunk(law, chunk, vocabulary_size, BLOCK)
        above += _measures(values, keys >= high, BY_COUNT)
        is_inside = (keys >= low) & (keys < high)
        rank = count + tl.cumsum(is_inside.to(tl.int32), axis=0) - 1
        tl.store(taken + rank, keys, mask=is_inside & (rank < CAPACITY))
        count += tl.sum(is_inside.to(tl.int32), axis=0)
        lowest = tl.minimum(lowest, tl.where(is_inside, keys, high))
        highest = tl.maximum(highest, tl.where(is_inside, keys, low))
        chunk = _next_chunk(largest_keys, low, chunk, BLOCK_CHUNKS)
    tl.debug_barrier()
    return count, tl.min(lowest, axis=0), tl.max(highest, axis=0), tl.sum(above, axis=0)


@triton.jit
def _cut_of(
    keys, low, high, above, target,
    ROOM: tl.constexpr, PAIRS: tl.constexpr, HALVINGS: tl.constexpr, BY_COUNT: tl.constexpr,
):  # fmt: skip
    """The largest key of [low, high) that has the target at or above it, `low` if none has. keys [ROOM]: all of the
    interval, others lower."""
    values, cut = keys.to(tl.float32, bitcast=True), low
    if ROOM <= PAIRS:
        measures = _measures(values[None, :], keys[None, :] >= keys[:, None], BY_COUNT)
        is_reached = above + tl.sum(measures, axis=1) >= target
        cut = tl.maximum(low, tl.max(tl.where(is_reached, keys, low), axis=0))
    else:
        for step in range(0, HALVINGS):
            higher = cut + (1 << (29 - step))
            if higher < high:
                measure = above + _measure(values, keys >= higher, BY_COUNT)
                cut = tl.where(measure >= target, higher, cut)
    return cut


@triton.jit
def interval(
    counts, masses, largest, top_k, top_p, first_way, num_chunks,
    BLOCK_CHUNKS: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
):  # fmt: skip
    """(low, high, how many keys reach high, mass of the law): both filters' cuts lie in [low, high). Ways before
    `first_way`, but for 0, were not looked at, because the cut does not lie below them."""
    chunks, ways = tl.arange(0, BLOCK_CHUNKS), tl.arange(0, WAYS)
    cells, is_chunk = chunks[:, None] * WAYS + ways[None, :], chunks[:, None] < num_chunks
    low_way, high_way = tl.zeros((), tl.int32), tl.full((), WAYS, tl.int32)
    num_above, total = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    if HAS_TOP_K:
        count = tl.sum(tl.load(counts + cells, mask=is_chunk, other=0.0), axis=0)  # whole numbers, exact
        low_way = tl.max(tl.where(count >= top_k, ways, 0), axis=0)
        high_way = tl.min(tl.where(count < top_k, ways, WAYS), axis=0)
    if HAS_TOP_P:
        is_known = is_chunk & ((ways == 0) | (ways >= first_way))[None, :]
        mass = tl.sum(tl.load(masses + cells, mask=is_known, other=0.0), axis=0)
        total = tl.sum(tl.where(ways == 0, mass, 0.0), axis=0)
        mass = tl.where(ways < first_way, total, mass)
        if HAS_TOP_K:  # leaves at least what reaches its own high way, so the cut of top_p has no less above it
            share = top_p * tl.sum(tl.where(ways == high_way, mass, 0.0), axis=0)
            high_way = tl.maximum(high_way, tl.min(tl.where(mass < share * (1 - MARGIN), ways, WAYS), axis=0))
        else:
            low_way = tl.max(tl.where(mass >= top_p * total * (1 + MARGIN), ways, 0), axis=0)
            high_way = tl.min(tl.where(mass < top_p * total * (1 - MARGIN), ways, WAYS), axis=0)
    if HAS_TOP_K:
        num_above = tl.sum(tl.where(ways == high_way, count, 0.0), axis=0).to(tl.float64)
    high = tl.where(high_way < WAYS, threshold(high_way), largest + 1)
    return threshold(low_way), high, num_above, total


@triton.jit
def cut_among(
    taken, count, low, high, num_above, mass_above, total, top_k, top_p, ROOM: tl.constexpr, PAIRS: tl.constexpr,
    HALVINGS: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
):  # fmt: skip
    """(cut, top_p's share, mass above the cut, how many keys equal it), all keys of [low, high) being taken out."""
    places = tl.arange(0, ROOM)
    keys = tl.load(taken + places, mask=places < count, other=-1)
    values, cut, share = keys.to(tl.float32, bitcast=True), low, total
    if HAS_TOP_K:
        cut = _cut_of(keys, cut, high, num_above, top_k.to(tl.float64), ROOM, PAIRS, HALVINGS, True)
        share = mass_above + _measure(values, keys >= cut, False)
    if HAS_TOP_P:
        share *= top_p
        cut = _cut_of(keys, cut, high, mass_above, share, ROOM, PAIRS, HALVINGS, False)
    ties = tl.sum((keys == cut).to(tl.int32), axis=0)
    return cut, share, mass_above + _measure(values, keys > cut, False), ties


@triton.jit
def _search(
    law, taken, largest_keys, low, high, count, lowest, highest, above, target, vocabulary_size,
    BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, CAPACITY: tl.constexpr, HALVINGS: tl.constexpr,
    BY_COUNT: tl.constexpr,
):  # fmt: skip
    """The largest key of [low, high) that has the target (a number of tokens or a mass) at or above it.

    count, lowest, highest, above: what `take_out` said of the interval.
    """
    while (count > CAPACITY) & (highest > lowest):  # the key looked for is one of the interval's
        low, high, middle = lowest, highest + 1, lowest + (highest - lowest + 1) // 2
        is_reached = measure_from(law, largest_keys, middle, vocabulary_size, BLOCK, BLOCK_CHUNKS, BY_COUNT) >= target
        low, high = tl.where(is_reached, middle, low), tl.where(is_reached, high, middle)
        count, lowest, highest, above = take_out(
            law, taken, largest_keys, low, high, vocabulary_size, BLOCK, BLOCK_CHUNKS, CAPACITY, BY_COUNT
        )
    if count > CAPACITY:
        cut = lowest
    else:
        places = tl.arange(0, CAPACITY)
        keys = tl.load(taken + places, mask=places < count, other=-1)
        cut = _cut_of(keys, low, high, above, target, CAPACITY, 0, HALVINGS, BY_COUNT)
    return cut


@triton.jit
def cut_by_reading(
    law, taken, largest_keys, low, high, count, lowest, highest, num_above, mass_above, total, top_k, top_p,
    vocabulary_size, BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, CAPACITY: tl.constexpr, HALVINGS: tl.constexpr,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
):  # fmt: skip
    """As `cut_among`, where [low, high) has more keys than there is room for; ties are not counted."""
    cut, share, above = low, total, tl.full((), float("nan"), tl.float64)
    if HAS_TOP_K:
        cut = _search(
            law, taken, largest_keys, low, high, count, lowest, highest, num_above, top_k.to(tl.float64),
            vocabulary_size, BLOCK, BLOCK_CHUNKS, CAPACITY, HALVINGS, True,
        )  # fmt: skip
    if HAS_TOP_P:
        if HAS_TOP_K:
            share = measure_from(law, largest_keys, cut, vocabulary_size, BLOCK, BLOCK_CHUNKS, False)
            count, lowest, highest, mass_above = take_out(
                law, taken, largest_keys, cut, high, vocabulary_size, BLOCK, BLOCK_CHUNKS, CAPACITY, False
            )
        share *= top_p
        cut = _search(
            law, taken, largest_keys, cut, high, count, lowest, highest, mass_above, share, vocabulary_size,
            BLOCK, BLOCK_CHUNKS, CAPACITY, HALVINGS, False,
        )  # fmt: skip
        above = measure_from(law, largest_keys, cut + 1, vocabulary_size, BLOCK, BLOCK_CHUNKS, False)
    return cut, share, above, vocabulary_size + 1


@triton.jit
def highest_ties(
    law, largest_keys, cut, num_kept, vocabulary_size, BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr
):  # fmt: skip
    """(the first of the `num_kept` highest tokens whose key is the cut, how many these are)."""
    chunks, missing, first = tl.arange(0, BLOCK_CHUNKS), num_kept, tl.where(num_kept > 0, 0, vocabulary_size)
    chunk = tl.max(tl.where(largest_keys >= cut, chunks, -1), axis=0)
    while (chunk >= 0) & (missing > 0):
        _, keys, tokens = load_chunk(law, chunk, vocabulary_size, BLOCK)
        is_tie = (keys == cut).to(tl.int32)
        count = tl.sum(is_tie, axis=0)
        later = count - tl.cumsum(is_tie, axis=0)  # ties behind each token
        if count >= missing:
            first = tl.min(tl.where((is_tie > 0) & (later < missing), tokens, vocabulary_size), axis=0)
        missing -= tl.minimum(count, missing)
        chunk = tl.max(tl.where((largest_keys >= cut) & (chunks < chunk), chunks, -1), axis=0)
    return first, num_kept - missing
