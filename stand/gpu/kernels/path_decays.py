"""What the kernels of linear attention start from: decays summed along paths, and queries and keys in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.forward.linear_attention import NORM_EPSILON
from stand.gpu.kernels.launch import launch_device

BLOCK_TOKENS = 16
WORD_BITS = tl.constexpr(64)


@triton.jit
def is_seen(ancestors, stride, tokens, is_token, others, is_other):
    """[I, J]: row-local node others[j] is an ancestor of packed token tokens[i], or is it."""
    words = ancestors + tokens[:, None].to(tl.int64) * stride + (others // WORD_BITS)[None, :]
    bits = tl.load(words, mask=is_token[:, None] & is_other[None, :], other=0)
    return ((bits >> (others % WORD_BITS).to(tl.int64)[None, :]) & 1) != 0


@triton.jit
def decays_between(sums, ancestors, stride, head, first, tokens, is_token, others, is_other, HEADS: tl.constexpr):
    """[I, J] float32: exp(G_i - G_j) where packed token others[j] of the row that begins at `first` is an ancestor of
    tokens[i], or is it; else 0."""
    own = tl.load(sums + tokens.to(tl.int64) * HEADS + head, mask=is_token, other=0.0)
    other = tl.load(sums + others.to(tl.int64) * HEADS + head, mask=is_other, other=0.0)
    seen = is_seen(ancestors, stride, tokens, is_token, others - first, is_other)
    return tl.exp(tl.where(seen, own[:, None] - other[None, :], float("-inf")))


@triton.jit
def products(
    left, row_stride, rows, is_row, right, step, column_stride, columns, is_column, size,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[I, J] float32: sums over n < size of left[rows[i] * row_stride + n] * right[n * step + columns[j] *
    column_stride], in float32 without TF32."""
    total = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
    for begin in range(0, size, BLOCK_K):
        numbers = begin + tl.arange(0, BLOCK_K)
        is_number = numbers < size
        a = left + rows[:, None] * row_stride + numbers[None, :]
        b = right + numbers[:, None] * step + columns[None, :] * column_stride
        total = tl.dot(
            tl.load(a, mask=is_row[:, None] & is_number[None, :], other=0.0),
            tl.load(b, mask=is_number[:, None] & is_column[None, :], other=0.0),
            total, input_precision="ieee",
        )  # fmt: skip
    return total


@triton.jit
def _prepare(
    query, key, log_decay, ancestors, offsets, queries, keys, sums, scale, epsilon, size,
    stride_query, stride_query_head, stride_key, stride_key_head, stride_words,
    HEADS: tl.constexpr, SHARED: tl.constexpr, IS_UNIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (row, head, block of its tokens); of the heads that share a key the first one brings it."""
    row, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    start = first + block * BLOCK_T
    if start < end:
        tokens = start + tl.arange(0, BLOCK_T)
        is_token, total = tokens < end, tl.zeros([BLOCK_T], tl.float32)
        for other in range(first, tl.minimum(start + BLOCK_T, end), BLOCK_T):
            others = other + tl.arange(0, BLOCK_T)
            seen = is_seen(ancestors, stride_words, tokens, is_token, others - first, others < end)
            decays = tl.load(log_decay + others.to(tl.int64) * HEADS + head, mask=others < end, other=0.0)
            total += tl.sum(tl.where(seen, decays.to(tl.float32)[None, :], 0.0), axis=1)
        tl.store(sums + tokens.to(tl.int64) * HEADS + head, total, mask=is_token)
        if head % SHARED == 0:
            own, elements = head // SHARED, tl.arange(0, BLOCK_K)
            places, cells = tokens[:, None].to(tl.int64), is_token[:, None] & (elements < size)[None, :]
            q = tl.load(query + places * stride_query + own * stride_query_head + elements[None, :], cells, 0.0)
            k = tl.load(key + places * stride_key + own * stride_key_head + elements[None, :], cells, 0.0)
            q, k = q.to(tl.float32), k.to(tl.float32)
            if IS_UNIT:
                q *= (1.0 / tl.sqrt(tl.sum(q * q, axis=1) + epsilon))[:, None]
                k *= (1.0 / tl.sqrt(tl.sum(k * k, axis=1) + epsilon))[:, None]
            targets = (places * (HEADS // SHARED) + own) * size + elements[None, :]
            tl.store(queries + targets, q * scale, mask=cells)
            tl.store(keys + targets, k, mask=cells)


@torch.library.custom_op("stand::prepared", mutates_args=())
def prepared(
    query: torch.Tensor,
    key: torch.Tensor,
    log_decay: torch.Tensor,
    ancestors: torch.Tensor,
    offsets: torch.Tensor,
    is_unit: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys [M, Hk, K] float32, and sums [M, H] float32 of log_decay [M, H] along each token's path;
    undefined at padding.

    query, key [M, Hk, K], each contiguous along K. is_unit: bring both to unit length, and scale queries by
    K ** -0.5. ancestors, offsets: see `StepPacket`.
    """
    (_, key_heads, size), heads = query.shape, log_decay.shape[1]
    queries, keys = (torch.empty(query.shape, dtype=torch.float32, device=query.device) for _ in range(2))
    sums = torch.empty(log_decay.shape, dtype=torch.float32, device=query.device)
    grid = (len(offsets) - 1, heads, triton.cdiv(most_row_nodes(ancestors), BLOCK_TOKENS))
    with launch_device(_prepare, query):
        _prepare[grid](
            query, key, log_decay.contiguous(), ancestors, offsets, queries, keys, sums,
            size**-0.5 if is_unit else 1.0, NORM_EPSILON, size,
            *query.stride()[:2], *key.stride()[:2], ancestors.stride(0),
            HEADS=heads, SHARED=heads // key_heads, IS_UNIT=is_unit, BLOCK_T=BLOCK_TOKENS,
            BLOCK_K=triton.next_power_of_2(size),
        )  # fmt: skip
    return queries, keys, sums


@prepared.register_fake
def _(query, key, log_decay, ancestors, offsets, is_unit):
    queries, keys = (one.new_empty(one.shape, dtype=torch.float32) for one in (query, key))
    return queries, keys, log_decay.new_empty(log_decay.shape, dtype=torch.float32)


def most_row_nodes(ancestors: torch.Tensor) -> int:
    """That a row can have in a step with ancestors [M, W]."""
    num_tokens, num_words = ancestors.shape
    return min(num_tokens, num_words * WORD_BITS.value)
