"""The gated delta rule's updates over trees: what each token adds to a head's state, u_i in
`stand.forward.linear_attention`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.path_decays import decays_between, most_row_nodes, products

BLOCK_PAIRS = 16  # tokens by tokens of a program
BLOCK_KEYS = 32  # numbers of a key at once
BLOCK_VALUES = 32  # columns of the state that a program solves for


@triton.jit
def _relate(
    keys, sums, beta, ancestors, offsets, system, size, width, stride_words,
    HEADS: tl.constexpr, SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (row, head, block of its tokens): beta_i exp(G_i - G_j) (k_j . k_i) for the ancestors j of token i, else
    0."""
    row, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    start = first + block * BLOCK_T
    if start < end:
        tokens, stride = start + tl.arange(0, BLOCK_T), HEADS // SHARED * size
        is_token, places, own_keys = tokens < end, tokens.to(tl.int64), keys + head // SHARED * size
        rates = tl.load(beta + places * HEADS + head, mask=is_token, other=0.0).to(tl.float32)
        for other in range(first, tl.minimum(start + BLOCK_T, end), BLOCK_T):
            others = other + tl.arange(0, BLOCK_T)
            is_other = others < end
            dots = products(
                own_keys, stride, places, is_token, own_keys, 1, stride, others.to(tl.int64), is_other, size,
                BLOCK_T, BLOCK_T, BLOCK_K,
            )  # fmt: skip
            decays = decays_between(
                sums, ancestors, stride_words, head, first, tokens, is_token, others, is_other, HEADS
            )
            related = tl.where(tokens[:, None] == others[None, :], 0.0, rates[:, None] * dots * decays)
            cells = (places[:, None] * HEADS + head) * width + (others - first)[None, :]
            tl.store(system + cells, related, mask=is_token[:, None] & is_other[None, :])


@triton.jit
def _solve(
    keys, value, sums, beta, system, states, offsets, cache_rows, updates, size, width, value_size,
    stride_value, stride_value_head,
    HEADS: tl.constexpr, SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (row, head, block of columns): u_i = beta_i (v_i - exp(G_i) S' k_i) - the sum over j of system[i, j] u_j,
    token after token."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    if first < end:
        nodes, columns = tl.arange(0, BLOCK_T), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_token, is_column, places = first + nodes < end, columns < value_size, (first + nodes).to(tl.int64)
        cells = is_token[:, None] & is_column[None, :]
        place = tl.load(cache_rows + row).to(tl.int64) * HEADS + head
        read = products(
            keys + head // SHARED * size, HEADS // SHARED * size, places, is_token,
            states + place * size * value_size, value_size, 1, columns, is_column, size, BLOCK_T, BLOCK_V, BLOCK_K,
        )  # fmt: skip
        fresh = tl.exp(tl.load(sums + places * HEADS + head, mask=is_token, other=0.0))
        rates = tl.load(beta + places * HEADS + head, mask=is_token, other=0.0).to(tl.float32)
        own = value + places[:, None] * stride_value + head * stride_value_head + columns[None, :]
        u = rates[:, None] * (tl.load(own, mask=cells, other=0.0).to(tl.float32) - fresh[:, None] * read)
        for node in range(1, end - first):
            related = system + ((first + node).to(tl.int64) * HEADS + head) * width + nodes
            factors = tl.load(related, mask=nodes < node, other=0.0)
            u -= tl.where(nodes == node, 1.0, 0.0)[:, None] * tl.sum(factors[:, None] * u, axis=0)[None, :]
        tl.store(updates + (places[:, None] * HEADS + head) * value_size + columns[None, :], u, mask=cells)


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
    shared = {"HEADS": heads, "SHARED": heads // keys.shape[1], "BLOCK_K": BLOCK_KEYS}
    num_rows = len(cache_rows)
    with launch_device(_relate, keys):
        _relate[(num_rows, heads, triton.cdiv(width, BLOCK_PAIRS))](
            keys, sums, beta, ancestors, offsets, system, size, width, ancestors.stride(0),
            BLOCK_T=BLOCK_PAIRS, **shared,
        )  # fmt: skip
        _solve[(num_rows, heads, triton.cdiv(value_size, BLOCK_VALUES))](
            keys, value, sums, beta, system, states, offsets, cache_rows, updates, size, width, value_size,
            *value.stride()[:2],
            BLOCK_T=max(triton.next_power_of_2(width), 16), BLOCK_V=BLOCK_VALUES, **shared,
        )  # fmt: skip
    return updates


@delta_updates.register_fake
def _(keys, value, sums, beta, states, ancestors, offsets, cache_rows):
    return value.new_empty(value.shape, dtype=torch.float32)
