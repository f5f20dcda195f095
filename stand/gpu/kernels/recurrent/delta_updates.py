"""The gated delta rule's updates over trees: what each token adds to a head's state, u_i in
`stand.forward.recurrent.linear_attention`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.recurrent.path_decays import decays_between, most_row_nodes, products

BLOCK_TOKENS = tl.constexpr(16)  # of a block of the system
HALF = tl.constexpr(8)  # of them
BLOCK_KEYS = 64  # numbers of a key at once
BLOCK_EARLIER = 64  # tokens whose updates are taken off at once
BLOCK_VALUES = 32  # columns of the state that a program solves for


@triton.jit(do_not_specialize=["width", "stride_words", "num_blocks"])  # one variant for all sizes of a step
def _set_up(
    keys, value, sums, beta, ancestors, offsets, cache_rows, states, system, updates, size, width, value_size,
    stride_words, stride_value, stride_value_head, num_blocks,
    HEADS: tl.constexpr, SHARED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (row, head, part). Of the blocks of the row's tokens, the first `num_blocks` parts relate each to those
    before it, as many invert their own, and the others fill `updates` with the right-hand sides, by blocks of columns.

    A row of one token has no system."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    start = first + part % num_blocks * BLOCK_TOKENS
    own_keys, stride = keys + head // SHARED * size, HEADS // SHARED * size
    if start < end:
        if part >= 2 * num_blocks:
            place = tl.load(cache_rows + row).to(tl.int64) * HEADS + head
            _fill(
                own_keys, stride, value + head * stride_value_head, stride_value, sums, beta,
                states + place * size * value_size, updates, size, value_size, head, start, end,
                (part // num_blocks - 2) * BLOCK_V, HEADS, BLOCK_K, BLOCK_V,
            )  # fmt: skip
        elif part >= num_blocks:
            if end - first > 1:
                _invert(
                    own_keys, stride, sums, beta, ancestors, stride_words, system, size, width, head, first, start, end,
                    HEADS, BLOCK_K,
                )  # fmt: skip
        else:
            for other in range(first, start, BLOCK_E):
                cells, is_cell, related = _related(
                    own_keys, stride, sums, beta, ancestors, stride_words, size, width, head, first, start, end, other,
                    start, HEADS, BLOCK_E, BLOCK_K,
                )  # fmt: skip
                tl.store(system + cells, related, mask=is_cell)


@triton.jit
def _related(
    keys, stride, sums, beta, ancestors, stride_words, size, width, head, first, start, end, other, limit,
    HEADS: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Of tokens i from `start` on and tokens j from `other` to below `limit` [i, j]: the cells of the system, which of
    them there are, and beta_i exp(G_i - G_j) (k_j . k_i) in float32 where j is an ancestor of i, else 0."""
    tokens, others = start + tl.arange(0, BLOCK_TOKENS), other + tl.arange(0, BLOCK_J)
    is_token, is_other = tokens < end, others < limit
    dots = products(
        keys, stride, tokens.to(tl.int64), is_token, keys, 1, stride, others.to(tl.int64), is_other, size,
        BLOCK_TOKENS, BLOCK_J, BLOCK_K,
    )  # fmt: skip
    decays = decays_between(sums, ancestors, stride_words, head, first, tokens, is_token, others, is_other, HEADS)
    rates = tl.load(beta + tokens.to(tl.int64) * HEADS + head, mask=is_token, other=0.0).to(tl.float32)
    related = tl.where(tokens[:, None] == others[None, :], 0.0, rates[:, None] * dots * decays)
    cells = (tokens[:, None].to(tl.int64) * HEADS + head) * width + (others - first)[None, :]
    return cells, is_token[:, None] & is_other[None, :], related


@triton.jit
def _invert(
    keys, stride, sums, beta, ancestors, stride_words, system, size, width, head, first, start, end,
    HEADS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """In place of a block on the diagonal, which counts as 1 there, its inverse: both halves row after row, side by
    side, then the corner below them."""
    cells, is_cell, related = _related(
        keys, stride, sums, beta, ancestors, stride_words, size, width, head, first, start, end, start, end,
        HEADS, BLOCK_TOKENS, BLOCK_K,
    )  # fmt: skip
    nodes = tl.arange(0, BLOCK_TOKENS)
    is_half = nodes[:, None] // HALF == nodes[None, :] // HALF
    turned = tl.trans(tl.where(is_half, related, 0.0))
    inverse = tl.where(nodes[:, None] == nodes[None, :], 1.0, 0.0)
    for node in range(1, tl.minimum(end - start, HALF)):
        factors = tl.sum(tl.where(nodes[None, :] % HALF == node, turned, 0.0), axis=1)  # of the row in its own half
        behind = tl.sum(factors[:, None] * inverse, axis=0)
        inverse -= tl.where(is_half & (nodes % HALF == node)[:, None], behind[None, :], 0.0)
    corner = tl.dot(tl.where(is_half, 0.0, related), inverse, input_precision="ieee")
    inverse -= tl.dot(inverse, corner, input_precision="ieee")
    tl.store(system + cells, inverse, mask=is_cell)


@triton.jit
def _fill(
    keys, stride, value, stride_value, sums, beta, state, updates, size, value_size, head, start, end, begin,
    HEADS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """beta_i (v_i - exp(G_i) S' k_i) for tokens from `start` on and columns from `begin` on."""
    tokens, columns = start + tl.arange(0, BLOCK_TOKENS), begin + tl.arange(0, BLOCK_V)
    is_token, is_column, places = tokens < end, columns < value_size, tokens.to(tl.int64)
    cells = is_token[:, None] & is_column[None, :]
    read = products(
        keys, stride, places, is_token, state, value_size, 1, columns, is_column, size, BLOCK_TOKENS, BLOCK_V, BLOCK_K
    )
    fresh = tl.exp(tl.load(sums + places * HEADS + head, mask=is_token, other=0.0))
    rates = tl.load(beta + places * HEADS + head, mask=is_token, other=0.0).to(tl.float32)
    own = tl.load(value + places[:, None] * stride_value + columns[None, :], mask=cells, other=0.0).to(tl.float32)
    rest = rates[:, None] * (own - fresh[:, None] * read)
    tl.store(updates + (places[:, None] * HEADS + head) * value_size + columns[None, :], rest, mask=cells)


@triton.jit(do_not_specialize=["width"])
def _solve(
    system, offsets, updates, width, value_size,
    HEADS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (row, head, block of columns): `updates`, block of tokens by block, from right-hand sides to what solves
    them."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_column = (columns < value_size)[None, :]
    if end - first > 1:
        for start in range(first, end, BLOCK_TOKENS):
            tokens = start + tl.arange(0, BLOCK_TOKENS)
            is_token = (tokens < end)[:, None]
            places = tokens[:, None].to(tl.int64) * HEADS + head
            own = updates + places * value_size + columns[None, :]
            u = tl.load(own, mask=is_token & is_column, other=0.0)
            for other in range(first, start, BLOCK_E):
                others = other + tl.arange(0, BLOCK_E)
                is_other = others < start
                cells = system + places * width + (others - first)[None, :]
                factors = tl.load(cells, mask=is_token & is_other[None, :], other=0.0)
                earlier = updates + (others[:, None].to(tl.int64) * HEADS + head) * value_size + columns[None, :]
                known = tl.load(earlier, mask=is_other[:, None] & is_column, other=0.0)
                u -= tl.dot(factors, known, input_precision="ieee")
            cells = system + places * width + (tokens - first)[None, :]
            inverse = tl.load(cells, mask=is_token & (tokens < end)[None, :], other=0.0)
            u = tl.dot(inverse, u, input_precision="ieee")
            tl.store(own, u, mask=is_token & is_column)
            tl.debug_barrier()  # other threads read it


@torch.library.custom_op("stand::delta_updates", mutates_args=())
def delta_updates(
    keys: torch.Tensor,
    value: torch.Tensor,
    sums: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    ancestors: torch.Tensor,
    offsets: torch.Tensor,
    cache_rows: torch.Tensor,
) -> torch.Tensor:
    """[M, H, V] float32, undefined at padding.

    keys [M, Hk, K] and sums [M, H] as `prepared` gives them; value [M, H, V], contiguous along V; beta [M, H]; states
    [R, H, K, V] float32, contiguous, by cache row; the rest: see `StepPacket`.
    """
    num_tokens, heads, value_size = value.shape
    size, width, beta = keys.shape[2], most_row_nodes(ancestors), beta.contiguous()
    system = torch.empty(num_tokens, heads, width, dtype=torch.float32, device=keys.device)
    updates = torch.empty(num_tokens, heads, value_size, dtype=torch.float32, device=keys.device)
    num_rows, num_blocks = len(cache_rows), triton.cdiv(width, BLOCK_TOKENS.value)
    num_columns = triton.cdiv(value_size, BLOCK_VALUES)  # blocks of them
    with launch_device(_set_up, keys):
        _set_up[(num_rows, heads, num_blocks * (2 + num_columns))](
            keys, value, sums, beta, ancestors, offsets, cache_rows, states, system, updates, size, width, value_size,
            ancestors.stride(0), *value.stride()[:2], num_blocks,
            HEADS=heads, SHARED=heads // keys.shape[1], BLOCK_E=BLOCK_EARLIER, BLOCK_V=BLOCK_VALUES,
            BLOCK_K=BLOCK_KEYS,
        )  # fmt: skip
        _solve[(num_rows, heads, num_columns)](
            system, offsets, updates, width, value_size, HEADS=heads, BLOCK_E=BLOCK_EARLIER, BLOCK_V=BLOCK_VALUES
        )
    return updates


@delta_updates.register_fake
def _(keys, value, sums, beta, states, ancestors, offsets, cache_rows):
    return value.new_empty(value.shape, dtype=torch.float32)
