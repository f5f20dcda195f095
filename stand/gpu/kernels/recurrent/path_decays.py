"""What the kernels of linear attention start from: decays summed along paths, how much a token writes, and queries and
keys in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.forward.recurrent.linear_attention import NORM_EPSILON
from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.swiglu import sigmoid

BLOCK_TOKENS = 16
WORD_BITS = tl.constexpr(64)
# Where decays come from: given, or by the formulas of `stand.forward.recurrent.gates.DeltaGates` and `StepSizes`.
GIVEN, GATED, STEPS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
def _softplus(x):
    """log(1 + exp(x)). Small results are as exact as large ones: log(1 + y) = y log(z) / (z - 1) for z = 1 + y rounded
    (Goldberg, What every computer scientist should know about floating-point arithmetic, theorem 4)."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    part = whole - 1.0
    rest = tl.where(part == 0.0, small, small * tl.log(whole) / tl.where(part == 0.0, 1.0, part))
    return tl.where(x > 0.0, x, 0.0) + rest


@triton.jit
def _step_sizes(raw, bias, head, least, most, HAS_BIAS: tl.constexpr, IS_SOFTPLUS: tl.constexpr):
    """Those of `stand.forward.recurrent.gates.StepSizes`, in float32, rounded to the type of `raw` after every
    operation."""
    dtype = raw.dtype
    steps = raw.to(tl.float32)
    if HAS_BIAS:
        steps = (steps + tl.load(bias + head).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    if IS_SOFTPLUS:
        steps = _softplus(steps).to(dtype).to(tl.float32)
    steps = tl.where(steps < least, least, steps)  # a NaN stays one
    return tl.where(steps > most, most, steps).to(dtype).to(tl.float32)


@triton.jit
def _log_decays(
    decay, factor, bias, tokens, is_token, head, stride, least, most,
    FORMULA: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """[I] float32: g of packed tokens."""
    raw = tl.load(decay + tokens.to(tl.int64) * stride + head, mask=is_token, other=0.0)
    if FORMULA == GATED:
        rest = _softplus(raw.to(tl.float32) + tl.load(bias + head).to(tl.float32))
        decays = -tl.exp(tl.load(factor + head).to(tl.float32)) * rest
    elif FORMULA == STEPS:
        steps = _step_sizes(raw, bias, head, least, most, HAS_BIAS, IS_SOFTPLUS)
        decays = tl.load(factor + head).to(tl.float32) * steps
    else:
        decays = raw.to(tl.float32)
    return decays


@triton.jit(do_not_specialize=["stride_words"])
def _prepare(
    query, key, decay, rate, factor, bias, ancestors, offsets, queries, keys, sums, rates,
    scale, epsilon, rate_scale, least, most, size,
    stride_query, stride_query_head, stride_key, stride_key_head, stride_decay, stride_rate, stride_words,
    HEADS: tl.constexpr, SHARED: tl.constexpr, FORMULA: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_SOFTPLUS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
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
            decays = _log_decays(
                decay, factor, bias, others, others < end, head, stride_decay, least, most, FORMULA, HAS_BIAS,
                IS_SOFTPLUS,
            )  # fmt: skip
            total += tl.sum(tl.where(seen, decays[None, :], 0.0), axis=1)
        cells = tokens.to(tl.int64) * HEADS + head
        tl.store(sums + cells, total, mask=is_token)
        if FORMULA == GATED:
            raw = tl.load(rate + tokens.to(tl.int64) * stride_rate + head, mask=is_token, other=0.0)
            own_rates = sigmoid(raw.to(tl.float32)).to(raw.dtype).to(tl.float32) * rate_scale
            tl.store(rates + cells, own_rates, mask=is_token)
        elif FORMULA == STEPS:
            raw = tl.load(decay + tokens.to(tl.int64) * stride_decay + head, mask=is_token, other=0.0)
            tl.store(rates + cells, _step_sizes(raw, bias, head, least, most, HAS_BIAS, IS_SOFTPLUS), mask=is_token)
        if head % SHARED == 0:
            own, elements = head // SHARED, tl.arange(0, BLOCK_K)
            places, inside = tokens[:, None].to(tl.int64), is_token[:, None] & (elements < size)[None, :]
            q = tl.load(query + places * stride_query + own * stride_query_head + elements[None, :], inside, 0.0)
            k = tl.load(key + places * stride_key + own * stride_key_head + elements[None, :], inside, 0.0)
            q, k = q.to(tl.float32), k.to(tl.float32)
            if FORMULA != STEPS:
                q *= (1.0 / tl.sqrt(tl.sum(q * q, axis=1) + epsilon))[:, None]
                k *= (1.0 / tl.sqrt(tl.sum(k * k, axis=1) + epsilon))[:, None]
            targets = (places * (HEADS // SHARED) + own) * size + elements[None, :]
            tl.store(queries + targets, q * scale, mask=inside)
            tl.store(keys + targets, k, mask=inside)


@torch.library.custom_op("stand::prepared", mutates_args=())
def prepared(
    query: torch.Tensor, key: torch.Tensor, log_decay: torch.Tensor, ancestors: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For the delta rule: queries and keys [M, Hk, K] float32, of unit length, queries scaled by K ** -0.5; and sums
    [M, H] float32 of log_decay [M, H] along each token's path. Undefined at padding.

    query, key [M, Hk, K], each contiguous along K; ancestors, offsets: see `StepPacket`.
    """
    queries, keys, sums, _ = _prepared(GIVEN.value, query, key, log_decay, ancestors, offsets)
    return queries, keys, sums


@prepared.register_fake
def _(query, key, log_decay, ancestors, offsets):
    return _results(query, log_decay)[:3]


@torch.library.custom_op("stand::prepared_gated", mutates_args=())
def prepared_gated(
    query: torch.Tensor,
    key: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    log_scale: torch.Tensor,
    bias: torch.Tensor,
    rate_scale: float,
    ancestors: torch.Tensor,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`prepared` of the log decays of `stand.forward.recurrent.gates.DeltaGates`, and beta [M, H] float32, rounded to
    the type of `rate` before it is scaled. decay, rate [M, H], adjacent heads; log_scale, bias [H]."""
    return _prepared(
        GATED.value, query, key, decay, ancestors, offsets,
        rate=rate, factor=log_scale, bias=bias, rate_scale=rate_scale,
    )  # fmt: skip


@prepared_gated.register_fake
def _(query, key, decay, rate, log_scale, bias, rate_scale, ancestors, offsets):
    return _results(query, decay)


@torch.library.custom_op("stand::prepared_steps", mutates_args=())
def prepared_steps(
    query: torch.Tensor,
    key: torch.Tensor,
    raw: torch.Tensor,
    bias: torch.Tensor | None,
    is_softplus: bool,
    least: float,
    most: float,
    decay: torch.Tensor,
    ancestors: torch.Tensor,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For Mamba-2: queries and keys as they are, in float32; sums [M, H] of decay [H] times the steps of
    `stand.forward.recurrent.gates.StepSizes`, and these [M, H] float32. raw [M, H], adjacent heads; bias [H]; the rest:
    see `prepared`."""
    return _prepared(
        STEPS.value, query, key, raw, ancestors, offsets,
        factor=decay, bias=bias, is_softplus=is_softplus, limits=(least, most),
    )  # fmt: skip


@prepared_steps.register_fake
def _(query, key, raw, bias, is_softplus, least, most, decay, ancestors, offsets):
    return _results(query, raw)


def _prepared(
    formula: int,
    query: torch.Tensor,
    key: torch.Tensor,
    decay: torch.Tensor,
    ancestors: torch.Tensor,
    offsets: torch.Tensor,
    *,
    rate: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    rate_scale: float = 1.0,
    is_softplus: bool = False,
    limits: tuple[float, float] = (0.0, 0.0),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(queries, keys, sums, rates); what a formula does not take is not read."""
    (_, key_heads, size), heads = query.shape, decay.shape[1]
    queries, keys, sums, rates = _results(query, decay)
    decay, rate = (one if one.stride(1) == 1 else one.contiguous() for one in (decay, decay if rate is None else rate))
    grid = (len(offsets) - 1, heads, triton.cdiv(most_row_nodes(ancestors), BLOCK_TOKENS))
    with launch_device(_prepare, query):
        _prepare[grid](
            query, key, decay, rate, *(decay if one is None else one.contiguous() for one in (factor, bias)),
            ancestors, offsets, queries, keys, sums, rates,
            1.0 if formula == STEPS.value else size**-0.5, NORM_EPSILON, rate_scale, *limits, size,
            *query.stride()[:2], *key.stride()[:2], decay.stride(0), rate.stride(0), ancestors.stride(0),
            HEADS=heads, SHARED=heads // key_heads, FORMULA=formula, HAS_BIAS=bias is not None,
            IS_SOFTPLUS=is_softplus, BLOCK_T=BLOCK_TOKENS, BLOCK_K=triton.next_power_of_2(size),
        )  # fmt: skip
    return queries, keys, sums, rates


def _results(query: torch.Tensor, decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for queries, keys, sums and rates."""
    shapes = query.shape, query.shape, decay.shape, decay.shape
    return tuple(query.new_empty(shape, dtype=torch.float32) for shape in shapes)


def most_row_nodes(ancestors: torch.Tensor) -> int:
    """That a row can have in a step with ancestors [M, W]."""
    num_tokens, num_words = ancestors.shape
    return min(num_tokens, num_words * WORD_BITS.value)
