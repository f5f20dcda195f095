"""Linear attention over trees: what tokens read of their row's state and of their ancestors' updates, and what a kept
path makes of the state. The sums are those of `stand.forward.recurrent.linear_attention`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.recurrent.path_decays import decays_between, most_row_nodes, products

BLOCK_TOKENS, BLOCK_KEYS, BLOCK_VALUES = 16, 32, 32
BLOCK_EARLIER = 32  # tokens before a block whose updates are read at once
WIDE_VALUES = 64  # columns of a program where a row may have several blocks: their relations are computed less often


@triton.jit(do_not_specialize=["num_tokens", "stride_words"])
def _attend(
    queries, keys, updates, rates, sums, skip, ancestors, states, offsets, cache_rows, output,
    num_tokens, size, value_size, stride_words, stride_update, stride_update_head,
    HEADS: tl.constexpr, SHARED: tl.constexpr, HAS_RATES: tl.constexpr, HAS_SKIP: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (row, head and block of columns, block of the row's tokens): exp(G_i) S' q_i + the sum over j, the
    ancestors of i and i itself, of exp(G_i - G_j) (k_j . q_i) rates_j u_j, + skip u_i. Padding is shared out among all
    rows and blocks."""
    row, block = tl.program_id(0), tl.program_id(2)
    num_blocks = tl.cdiv(value_size, BLOCK_V)
    head, columns = tl.program_id(1) // num_blocks, tl.program_id(1) % num_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    start = first + block * BLOCK_T
    if start < end:
        tokens, stride = start + tl.arange(0, BLOCK_T), HEADS // SHARED * size
        is_token, is_column, places = tokens < end, columns < value_size, tokens.to(tl.int64)
        place, of_head = tl.load(cache_rows + row).to(tl.int64) * HEADS + head, head // SHARED * size
        total = products(
            queries + of_head, stride, places, is_token,
            states + place * size * value_size, value_size, 1, columns, is_column, size, BLOCK_T, BLOCK_V, BLOCK_K,
        )  # fmt: skip
        total *= tl.exp(tl.load(sums + places * HEADS + head, mask=is_token, other=0.0))[:, None]
        for other in range(first, start, BLOCK_E):
            total += _brought(
                queries + of_head, keys + of_head, stride, updates, rates, sums, ancestors, stride_words, columns,
                is_column, size, stride_update, stride_update_head, head, first, tokens, is_token, other, start,
                HEADS, HAS_RATES, BLOCK_T, BLOCK_E, BLOCK_K,
            )  # fmt: skip
        total += _brought(
            queries + of_head, keys + of_head, stride, updates, rates, sums, ancestors, stride_words, columns,
            is_column, size, stride_update, stride_update_head, head, first, tokens, is_token, start, end,
            HEADS, HAS_RATES, BLOCK_T, BLOCK_T, BLOCK_K,
        )  # fmt: skip
        if HAS_SKIP:
            u = updates + places[:, None] * stride_update + head * stride_update_head + columns[None, :]
            own = tl.load(u, mask=is_token[:, None] & is_column[None, :], other=0.0).to(tl.float32)
            total += tl.load(skip + head).to(tl.float32) * own
        cells = (places[:, None] * HEADS + head) * value_size + columns[None, :]
        tl.store(output + cells, total.to(output.dtype.element_ty), mask=is_token[:, None] & is_column[None, :])
    number, count = row * tl.num_programs(2) + block, tl.num_programs(0) * tl.num_programs(2)
    for begin in range(tl.load(offsets + tl.num_programs(0)) + number * BLOCK_T, num_tokens, count * BLOCK_T):
        tokens = begin + tl.arange(0, BLOCK_T)
        cells = (tokens[:, None].to(tl.int64) * HEADS + head) * value_size + columns[None, :]
        nothing = tl.zeros([BLOCK_T, BLOCK_V], output.dtype.element_ty)
        tl.store(output + cells, nothing, mask=(tokens < num_tokens)[:, None] & (columns < value_size)[None, :])


@triton.jit
def _brought(
    queries, keys, stride, updates, rates, sums, ancestors, stride_words, columns, is_column, size, stride_update,
    stride_update_head, head, first, tokens, is_token, other, limit,
    HEADS: tl.constexpr, HAS_RATES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[T, V]: the sum over tokens j from `other` to below `limit`, ancestors of i or i itself, of
    exp(G_i - G_j) (k_j . q_i) rates_j u_j."""
    others = other + tl.arange(0, BLOCK_J)
    is_other, places = others < limit, others.to(tl.int64)
    dots = products(
        queries, stride, tokens.to(tl.int64), is_token, keys, 1, stride, places, is_other, size,
        BLOCK_T, BLOCK_J, BLOCK_K,
    )  # fmt: skip
    decays = decays_between(sums, ancestors, stride_words, head, first, tokens, is_token, others, is_other, HEADS)
    u = updates + places[:, None] * stride_update + head * stride_update_head + columns[None, :]
    brought = tl.load(u, mask=is_other[:, None] & is_column[None, :], other=0.0).to(tl.float32)
    if HAS_RATES:
        brought *= tl.load(rates + places * HEADS + head, mask=is_other, other=0.0)[:, None]
    return tl.dot(dots * decays, brought, input_precision="ieee")


@torch.library.custom_op("stand::linear_attention", mutates_args=())
def linear_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    updates: torch.Tensor,
    rates: torch.Tensor | None,
    sums: torch.Tensor,
    skip: torch.Tensor | None,
    states: torch.Tensor,
    ancestors: torch.Tensor,
    offsets: torch.Tensor,
    cache_rows: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[M, H, V] of this type, zeros at padding.

    queries, keys [M, Hk, K], sums [M, H] and rates [M, H] (None: all 1) as `path_decays` gives them; updates [M, H, V],
    contiguous along V; skip [H]: how much of its own update a token's output gets on top; states [R, H, K, V] float32,
    contiguous, by cache row; the rest: see `StepPacket`.
    """
    (num_tokens, heads, value_size), (_, key_heads, size) = updates.shape, keys.shape
    output = torch.empty(num_tokens, heads, value_size, dtype=dtype, device=keys.device)
    num_blocks = triton.cdiv(most_row_nodes(ancestors), BLOCK_TOKENS)
    columns = BLOCK_VALUES if num_blocks == 1 else WIDE_VALUES
    with launch_device(_attend, keys):
        _attend[(len(cache_rows), heads * triton.cdiv(value_size, columns), num_blocks)](
            queries, keys, updates, sums if rates is None else rates, sums, sums if skip is None else skip.contiguous(),
            ancestors, states, offsets, cache_rows, output, num_tokens, size, value_size, ancestors.stride(0),
            *updates.stride()[:2],
            HEADS=heads, SHARED=heads // key_heads, HAS_RATES=rates is not None, HAS_SKIP=skip is not None,
            BLOCK_T=BLOCK_TOKENS, BLOCK_E=BLOCK_EARLIER, BLOCK_K=BLOCK_KEYS, BLOCK_V=columns,
        )  # fmt: skip
    return output


@linear_attention.register_fake
def _(queries, keys, updates, rates, sums, skip, states, ancestors, offsets, cache_rows, dtype):
    return updates.new_empty(updates.shape, dtype=dtype)


@triton.jit
def _keep_states(
    keys, updates, rates, sums, states, offsets, cache_rows, path, size, value_size, stride_update, stride_update_head,
    stride_path, max_depth,
    HEADS: tl.constexpr, SHARED: tl.constexpr, HAS_RATES: tl.constexpr, BLOCK_PATH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (row, head, block of columns): with e the last token that stays,
    exp(G_e) S + the sum over j, e and its ancestors, of exp(G_e - G_j) k_j rates_j u_j'."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    if first < end:
        depths, numbers = tl.arange(0, BLOCK_PATH), tl.arange(0, BLOCK_K)
        columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        nodes = tl.load(path + row * stride_path + depths, mask=depths < max_depth, other=-1)
        length = tl.sum((nodes >= 0).to(tl.int32), axis=0)
        last = first + tl.sum(tl.where(depths == length - 1, nodes, 0), axis=0)
        last_sum = tl.load(sums + last * HEADS + head)
        place = tl.load(cache_rows + row).to(tl.int64) * HEADS + head
        cells = states + (place * size + numbers)[:, None] * value_size + columns[None, :]
        is_number, is_column = numbers < size, columns < value_size
        state = tl.load(cells, mask=is_number[:, None] & is_column[None, :], other=0.0) * tl.exp(last_sum)
        for depth in range(0, length + 1):
            token = first + tl.sum(tl.where(depths == depth - 1, nodes, 0), axis=0)  # the root at depth 0
            weight = tl.exp(last_sum - tl.load(sums + token * HEADS + head))
            k = tl.load(keys + (token * (HEADS // SHARED) + head // SHARED) * size + numbers, is_number, 0.0)
            u = tl.load(updates + token * stride_update + head * stride_update_head + columns, is_column, 0.0)
            u = u.to(tl.float32)
            if HAS_RATES:
                u *= tl.load(rates + token * HEADS + head)
            state += k[:, None] * (weight * u)[None, :]
        tl.store(cells, state, mask=is_number[:, None] & is_column[None, :])


@torch.library.custom_op("stand::keep_states", mutates_args=("states",))
def keep_states(
    keys: torch.Tensor,
    updates: torch.Tensor,
    rates: torch.Tensor | None,
    sums: torch.Tensor,
    states: torch.Tensor,
    offsets: torch.Tensor,
    cache_rows: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """Make `states` [R, H, K, V] those behind the kept paths; the rest as in `linear_attention`.

    path [B, L]: row-local nodes kept at depths 1, 2, ..., then -1; the root stays. Rows without tokens stay as they
    are.
    """
    (_, key_heads, size), (_, heads, value_size), (num_rows, max_depth) = keys.shape, updates.shape, path.shape
    with launch_device(_keep_states, states):
        _keep_states[(num_rows, heads, triton.cdiv(value_size, BLOCK_VALUES))](
            keys, updates, sums if rates is None else rates, sums, states, offsets, cache_rows, path, size, value_size,
            *updates.stride()[:2], path.stride(0), max_depth,
            HEADS=heads, SHARED=heads // key_heads, HAS_RATES=rates is not None,
            BLOCK_PATH=triton.next_power_of_2(max_depth), BLOCK_K=triton.next_power_of_2(size), BLOCK_V=BLOCK_VALUES,
        )  # fmt: skip


@keep_states.register_fake
def _(keys, updates, rates, sums, states, offsets, cache_rows, path):
    return None
