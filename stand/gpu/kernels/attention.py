"""Tree attention over packed tokens: split keys, an ancestor bitmask on the new tokens only.

The work list says which program attends which tokens to which slots. Scores live in powers of two (exp2 is what the
hardware has); partial results are normalised and carry the logarithm of their mass, as in FlashAttention (Dao 2023,
arXiv 2307.08691) and Flash-Decoding. The bitmask costs nothing on the committed prefix: it is read only in the blocks
behind it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.forward.attention_shape import HeadSizes
from stand.gpu.kernels.key_blocks import block_of_keys, block_offsets, pages_at, real_cells
from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.merge import merge_splits
from stand.gpu.kernels.proxy_fence import MUST_ADD_FENCES, fences_added
from stand.gpu.tuning.attention_tiles import blocks, limits_of

MOST_WORDS = 4  # 64-bit words of ancestors per token
PROGRAMS_PER_PROCESSOR = 2
INTERPRETED_PROGRAMS = 3
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _is_live(items, index, num_items, KEY_HEADS: tl.constexpr):
    """Whether program index `index` has an item with tokens."""
    exists = index < num_items * KEY_HEADS
    return tl.load(items + (index // KEY_HEADS) * 8 + 2, mask=exists, other=0) > 0


@triton.jit
def _scores(query, key, turned_query, turned, scale, softcap, HAS_SOFTCAP: tl.constexpr, IS_LATENT: tl.constexpr):
    """[BLOCK_M, BLOCK_N] scores, to be multiplied by `_score_unit`; of latents with their turned parts."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if IS_LATENT:
        scores = tl.dot(turned_query, tl.trans(turned), scores, input_precision="ieee")
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)); right at both infinities
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale / softcap * 2.0 * LOG2_E)))
    return scores


@triton.jit
def _score_unit(scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """What a score counts as a power of two."""
    unit = scale * LOG2_E
    if HAS_SOFTCAP:
        unit = softcap * LOG2_E
    return unit


@triton.jit
def _absorb(scores, unit, value, accumulator, highest, mass):
    """Online softmax: take one block of scores and values in. A row that has seen nothing stays at -inf, 0, 0.

    The unit is applied here, so that scaling and the subtraction of the highest are one instruction.
    """
    new_highest = tl.maximum(highest, tl.max(scores, 1) * unit)
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores * unit - reference[:, None])
    shrink = tl.exp2(highest - reference)
    mass = mass * shrink + tl.sum(weights, 1)
    accumulator = accumulator * shrink[:, None]
    accumulator = tl.dot(weights.to(value.dtype), value, accumulator, input_precision="ieee")
    return accumulator, new_highest, mass


@triton.jit
def _hide_others(scores, words, bits, inside, is_masked):
    """-inf for keys after the end, and for new tokens whose bit is not set in the query's word of ancestors."""
    word = tl.load(words, mask=is_masked, other=-1)
    seen = (word[:, None] >> bits.to(tl.int64)[None, :]) & 1
    return tl.where(inside[None, :] & (seen != 0), scores, float("-inf"))


@triton.jit
def _before_keys(sinks, heads, split, BLOCK_M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """(highest [BLOCK_M], mass [BLOCK_M]) of a split before its first key: a sink counts as a key of the first one."""
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        highest = tl.where(split == 0, tl.load(sinks + heads).to(tl.float32) * LOG2_E, highest)
        mass = tl.where(split == 0, 1.0, mass)
    return highest, mass


@triton.jit
def _attend_keys(
    queries, turned_queries, keys, values, row_pages, ancestors, positions, packed, in_tile, row_first, length, first,
    k_end, blind, highest, mass, scale, softcap, PAGE_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr,
    VALUE_PAGE_STRIDE: tl.constexpr, VALUE_SLOT_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, IS_PAGED: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_E: tl.constexpr,
    WORDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, IS_LATENT: tl.constexpr,
):  # fmt: skip
    """(accumulator [BLOCK_M, BLOCK_E], highest [BLOCK_M], mass [BLOCK_M]) of a tile over slots [first, k_end), the
    latter two beginning with what is given. Of latents, whose turned parts are in `values`, the accumulator has BLOCK_D
    columns.

    Blocks of committed keys, then blocks of new tokens from the first one on: a block of at most 64 tokens needs a
    single word of ancestors, and only these and the last committed block need a mask at all. No block is longer than a
    page, so it lies in two at most; which ones is read while the block before is computed.
    """
    columns = tl.arange(0, BLOCK_N)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D if IS_LATENT else BLOCK_E], tl.float32)
    unit = _score_unit(scale, softcap, HAS_SOFTCAP)
    prefix_end = tl.minimum(k_end, length)
    num_prefix_blocks = tl.cdiv(tl.maximum(prefix_end - first, 0), BLOCK_N)
    num_tail_blocks = tl.cdiv(tl.maximum(k_end - length, 0), BLOCK_N)
    _, _, start = block_of_keys(0, num_prefix_blocks, first, length, BLOCK_N)
    near, far = pages_at(row_pages, start, k_end - 1, PAGE_SIZE, BLOCK_N)
    for block in range(0, num_prefix_blocks + num_tail_blocks):
        is_tail, tail_first, start = block_of_keys(block, num_prefix_blocks, first, length, BLOCK_N)
        end = tl.where(is_tail, k_end, prefix_end)
        slots = start + columns
        inside = slots < end
        key_cells = block_offsets(start, columns, near, far, PAGE_STRIDE, SLOT_STRIDE, PAGE_SIZE, IS_PAGED, BLOCK_D)
        value_cells = block_offsets(
            start, columns, near, far, VALUE_PAGE_STRIDE, VALUE_SLOT_STRIDE, PAGE_SIZE, IS_PAGED, BLOCK_E
        )
        if IS_PAGED:
            _, _, coming = block_of_keys(block + 1, num_prefix_blocks, first, length, BLOCK_N)
            near, far = pages_at(row_pages, coming, k_end - 1, PAGE_SIZE, BLOCK_N)
        key = tl.load(keys + key_cells, mask=real_cells(inside, HEAD_SIZE, BLOCK_D), other=0.0)
        value = tl.load(values + value_cells, mask=real_cells(inside, VALUE_SIZE, BLOCK_E), other=0.0)
        scores = _scores(queries, key, turned_queries, value, scale, softcap, HAS_SOFTCAP, IS_LATENT)
        key_positions = slots
        if is_tail | (start + BLOCK_N > end):
            words = ancestors + packed * WORDS + tail_first // 64
            scores = _hide_others(scores, words, tail_first % 64 + columns, inside, in_tile & is_tail)
            if HAS_WINDOW:
                places = positions + row_first + tail_first + columns
                tail_positions = tl.load(places, mask=inside & is_tail, other=0).to(tl.int32)
                key_positions = tl.where(is_tail, tail_positions, slots)
        if HAS_WINDOW:
            scores = tl.where(key_positions[None, :] > blind[:, None], scores, float("-inf"))
        if IS_LATENT:
            accumulator, highest, mass = _absorb(scores, unit, key, accumulator, highest, mass)
        else:
            accumulator, highest, mass = _absorb(scores, unit, value, accumulator, highest, mass)
    return accumulator, highest, mass


@triton.jit
def _store_result(
    accumulator, highest, mass, partial_starts, partials, log_sums, mixed, first_token, split, tokens, heads, in_tile,
    NUM_HEADS: tl.constexpr, MIXED_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a tile: into `mixed` where it has one split, else as a partial result, to be merged."""
    has_mass = mass > 0
    mass = tl.where(has_mass, mass, 1.0)
    result = accumulator / mass[:, None]
    first_partial = tl.load(partial_starts + first_token)
    num_splits = tl.load(partial_starts + first_token + 1) - first_partial
    is_whole = num_splits == 1
    begin = tl.where(is_whole, first_token, first_partial + split).to(tl.int64) * NUM_HEADS
    places = tokens * (num_splits * NUM_HEADS) + heads
    cells = places[:, None] * MIXED_SIZE + tl.arange(0, BLOCK)[None, :]
    tile = real_cells(in_tile, MIXED_SIZE, BLOCK)
    if is_whole:
        tl.store(mixed + begin * MIXED_SIZE + cells, result.to(mixed.dtype.element_ty), mask=tile)
    else:
        log_sum = tl.where(has_mass, highest + tl.log2(mass), float("-inf"))
        tl.store(log_sums + begin + places, log_sum, mask=in_tile)
        tl.store(partials + begin * MIXED_SIZE + cells, result, mask=tile)


@triton.jit
def _clear_padding(mixed, partial_starts, num_tokens, ROW_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros for the tokens that no item covers: those without partial results."""
    token = tl.program_id(0)
    while token < num_tokens:
        if tl.load(partial_starts + token) == tl.load(partial_starts + token + 1):
            for first in range(0, ROW_SIZE, BLOCK):
                cells = first + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK], mixed.dtype.element_ty)
                tl.store(mixed + token.to(tl.int64) * ROW_SIZE + cells, zeros, mask=cells < ROW_SIZE)
        token += tl.num_programs(0)


@triton.jit(do_not_specialize=["num_tokens", "num_items", "window", "table_stride"])
def _tree_attention_kernel(
    query, keys, values, pages, ancestors, positions, items, partial_starts, partials, log_sums, sinks, mixed,
    num_tokens, num_items, scale, window, softcap, query_token_stride, query_head_stride, table_stride,
    PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, VALUE_PAGE_STRIDE: tl.constexpr,
    VALUE_HEAD_STRIDE: tl.constexpr, VALUE_SLOT_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, IS_PAGED: tl.constexpr,
    KEY_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_SIZE: tl.constexpr, BLOCK_E: tl.constexpr, WORDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_LATENT: tl.constexpr,
    ADDS_FENCES: tl.constexpr,
):  # fmt: skip
    """Each program walks over (item, key head) pairs until the first item without tokens.

    query [M, H, D]; keys [P, Hkv, S, D]; values [P, Hkv, S, E]; pages [R, T] int32; ancestors [M, W] int64; positions
    [M] int64; items [I, 8] int32; partial_starts [M + 1] int32; partials [P, H, E] float32; log_sums [P, H] float32;
    sinks [H] or anything; mixed [M, H, E]. IS_LATENT: queries [M, H, D + E], values are turned parts of keys, mixed is
    [M, H, D]. ADDS_FENCES: whether `fences_added` adds what this Triton leaves out. A fixed grid: the list has room for
    the longest context, and thousands of programs that find out that they are empty would cost more than short work.
    """
    index = tl.program_id(0)
    rows, sizes = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens = rows // GROUPS
    MIXED_SIZE: tl.constexpr = HEAD_SIZE if IS_LATENT else VALUE_SIZE
    MIXED_BLOCK: tl.constexpr = BLOCK_D if IS_LATENT else BLOCK_E
    while _is_live(items, index, num_items, KEY_HEADS):
        item = items + (index // KEY_HEADS) * 8
        key_head = index % KEY_HEADS
        first_token, split = tl.load(item + 1), tl.load(item + 7)
        in_tile = tokens < tl.load(item + 2)
        packed = first_token + tokens
        heads = key_head * GROUPS + rows % GROUPS
        tile = real_cells(in_tile, HEAD_SIZE, BLOCK_D)
        query_starts = packed.to(tl.int64) * query_token_stride + heads * query_head_stride
        queries = tl.load(query + query_starts[:, None] + sizes[None, :], mask=tile, other=0.0)
        turned_queries = queries
        if IS_LATENT:
            cells = query_starts[:, None] + HEAD_SIZE + tl.arange(0, BLOCK_E)[None, :]
            turned_queries = tl.load(query + cells, mask=real_cells(in_tile, VALUE_SIZE, BLOCK_E), other=0.0)
        first, blind = tl.load(item + 5), packed
        if HAS_WINDOW:
            # a token sees positions above its own less the window; a committed slot's position is its number
            blind = tl.load(positions + packed, mask=in_tile, other=0).to(tl.int32) - window
            earliest = tl.min(tl.where(in_tile, blind, 2147483647)) + 1
            first = first + tl.maximum(earliest - first, 0) // BLOCK_N * BLOCK_N
        highest, mass = _before_keys(sinks, heads, split, BLOCK_M, HAS_SINKS)
        accumulator, highest, mass = _attend_keys(
            queries, turned_queries, keys + key_head.to(tl.int64) * HEAD_STRIDE,
            values + key_head.to(tl.int64) * VALUE_HEAD_STRIDE, pages + tl.load(item + 3) * table_stride, ancestors,
            positions, packed, in_tile, tl.load(item), tl.load(item + 4), first, tl.load(item + 6), blind, highest,
            mass, scale, softcap, PAGE_STRIDE, SLOT_STRIDE, VALUE_PAGE_STRIDE, VALUE_SLOT_STRIDE, PAGE_SIZE, IS_PAGED,
            HEAD_SIZE, BLOCK_D, VALUE_SIZE, BLOCK_E, WORDS, BLOCK_M, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, IS_LATENT,
        )  # fmt: skip
        _store_result(
            accumulator, highest, mass, partial_starts, partials, log_sums, mixed, first_token, split, tokens, heads,
            in_tile, KEY_HEADS * GROUPS, MIXED_SIZE, MIXED_BLOCK,
        )  # fmt: skip
        index += tl.num_programs(0)
    _clear_padding(mixed, partial_starts, num_tokens, KEY_HEADS * GROUPS * MIXED_SIZE, MIXED_BLOCK)


@torch.library.custom_op("stand::tree_attention", mutates_args=("partials", "log_sums"))
def tree_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, ancestors: torch.Tensor,
    positions: torch.Tensor, items: torch.Tensor, partial_starts: torch.Tensor, partials: torch.Tensor,
    log_sums: torch.Tensor, scale: float, tile_tokens: int, window: int = 0, softcap: float = 0.0,
    sinks: torch.Tensor | None = None, is_latent: bool = False,
) -> torch.Tensor:  # fmt: skip
    """What each packed token draws from the values it sees: [M, H, E], contiguous, in the query's dtype.

    query [M, H, D]; keys [P, Hkv, S, D] and values [P, Hkv, S, E] in the query's dtype: pages of S slots, any strides
    but the last; pages [R, T] int32: slot s of row r lies in page pages[r, s // S]; ancestors [M, W <= 4] int64, bit
    j % 64 of word j // 64 set when the token sees token j of its row (its own bit included, no later one); positions
    [M] int64, slot k of the committed prefix being position k; items [I, 8] and partial_starts [M + 1] int32
    as `WorkList` makes them with `tile_tokens`; partials [P, H, E] and log_sums [P, H] float32 are scratch for P
    partial results: with P = 0 no row may be split, and nothing is merged. Scores are multiplied by `scale` > 0.
    `window` > 0: a token sees positions above its own less the window. `softcap` > 0: scores become softcap *
    tanh(score / softcap) (Gemma 2). `sinks` [H]: a logit per head that takes mass and gives nothing (gpt-oss). A token
    that no item covers must have no partial results and gets zeros. With T > 1 a page must be no shorter than a block
    of keys (at most 64 slots). Raises ValueError on wrong shapes.

    is_latent: a key is D numbers in `keys` and E turned ones in `values`, queries have D + E, and what is mixed are the
    D numbers of keys: the result and `partials` have D instead of E (see `stand.forward.latent_keys`).
    """
    scratch = (partials, log_sums)
    _check_call(
        query, keys, values, pages, ancestors, positions, items, partial_starts, *scratch, scale, sinks, is_latent
    )
    mixed = query.new_empty((*query.shape[:2], (keys if is_latent else values).shape[3]))
    with launch_device(_tree_attention_kernel, query), fences_added():
        _attend(
            query, keys, values, pages, ancestors, positions, items, partial_starts, *scratch, sinks, mixed,
            scale, tile_tokens, window, softcap, is_latent,
        )  # fmt: skip
    return mixed


@tree_attention.register_fake
def _(
    query, keys, values, pages, ancestors, positions, items, partial_starts, partials, log_sums, scale, tile_tokens,
    window=0, softcap=0.0, sinks=None, is_latent=False,
):  # fmt: skip
    return query.new_empty((*query.shape[:2], (keys if is_latent else values).shape[3]))


def _attend(
    query, keys, values, pages, ancestors, positions, items, partial_starts, partials, log_sums, sinks, mixed, scale,
    tile_tokens, window, softcap, is_latent,
) -> None:  # fmt: skip
    """Launch the kernel, and the merge where there is room for splits."""
    key_heads, head_size, value_size = keys.shape[1], keys.shape[3], values.shape[3]
    groups = query.shape[1] // key_heads
    kind = HeadSizes(head_size, value_size, is_latent)
    sizes = blocks(tile_tokens * groups, kind, query.dtype, limits=limits_of(query.device))
    if pages.shape[1] > 1 and keys.shape[2] < sizes.keys:
        raise ValueError(f"pages must have at least {sizes.keys} slots here, got {keys.shape[2]}; take longer pages")
    _tree_attention_kernel[(_num_programs(query.device, len(items) * key_heads),)](
        query, keys, values, pages, ancestors, positions, items, partial_starts, partials, log_sums,
        query if sinks is None else sinks, mixed, len(query), len(items), scale, window, softcap,
        *query.stride()[:2], pages.stride(0),
        PAGE_STRIDE=keys.stride(0),
        HEAD_STRIDE=keys.stride(1),
        SLOT_STRIDE=keys.stride(2),
        VALUE_PAGE_STRIDE=values.stride(0),
        VALUE_HEAD_STRIDE=values.stride(1),
        VALUE_SLOT_STRIDE=values.stride(2),
        PAGE_SIZE=keys.shape[2],
        IS_PAGED=pages.shape[1] > 1,
        KEY_HEADS=key_heads,
        GROUPS=groups,
        HEAD_SIZE=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        VALUE_SIZE=value_size,
        BLOCK_E=triton.next_power_of_2(value_size),
        WORDS=ancestors.shape[1],
        BLOCK_M=sizes.rows,
        BLOCK_N=sizes.keys,
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        IS_LATENT=is_latent,
        ADDS_FENCES=MUST_ADD_FENCES,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )  # fmt: skip
    if len(partials):
        merge_splits(partials, log_sums, partial_starts, mixed)


def _num_programs(device: torch.device, num_pairs: int) -> int:
    """A full GPU at most: further pairs of item and key head are taken in turn."""
    if device.type == "cuda":
        offered = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    else:
        offered = INTERPRETED_PROGRAMS
    return max(min(num_pairs, offered), 1)


def _check_call(
    query, keys, values, pages, ancestors, positions, items, partial_starts, partials, log_sums, scale, sinks, is_latent
) -> None:
    """Shapes, dtypes and strides; all of it known without a look at the device."""
    num_tokens, num_heads, query_size = query.shape
    head_size = query_size - values.shape[-1] if is_latent else query_size
    mixed_size = head_size if is_latent else values.shape[-1]
    expected = {
        "keys": (keys, (*keys.shape[:3], head_size), query.dtype),
        "values": (values, (*keys.shape[:3], values.shape[-1]), query.dtype),
        "pages": (pages, (pages.shape[0], pages.shape[-1]), torch.int32),
        "ancestors": (ancestors, (num_tokens, ancestors.shape[-1]), torch.int64),
        "positions": (positions, (num_tokens,), torch.int64),
        "items": (items, (items.shape[0], 8), torch.int32),
        "partial_starts": (partial_starts, (num_tokens + 1,), torch.int32),
        "partials": (partials, (partials.shape[0], num_heads, mixed_size), torch.float32),
        "log_sums": (log_sums, (partials.shape[0], num_heads), torch.float32),
    }
    if sinks is not None:
        expected["sinks"] = (sinks, (num_heads,), sinks.dtype)
    for name, (tensor, shape, dtype) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{name} must be {list(shape)} in {dtype} beside a query {list(query.shape)} in {query.dtype}, "
                f"got {list(tensor.shape)} in {tensor.dtype}"
            )
        if name not in ("keys", "values") and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}; call contiguous()")
    if any(tensor.stride(-1) != 1 for tensor in (query, keys, values)):
        raise ValueError(
            "query, keys and values must have stride 1 in the last dimension, got strides "
            f"{query.stride()}, {keys.stride()} and {values.stride()}; call contiguous()"
        )
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}; turn the queries around instead")
    if num_heads % keys.shape[1] or not 1 <= ancestors.shape[1] <= MOST_WORDS:
        raise ValueError(
            f"query heads must be a multiple of key heads and ancestors have 1 to {MOST_WORDS} words per token, "
            f"got {num_heads} and {keys.shape[1]} heads and {ancestors.shape[1]} words; split longer rows into chunks"
        )
