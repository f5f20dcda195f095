"""Rotary positions, optional norms of query and key heads, and the cache write of keys and values in one kernel.

Su et al., RoFormer, arXiv 2104.09864, equation 34. Components pair as `stand.fusion.formulas.PAIRINGS` says. Those
beyond `rotary` pass unchanged.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.fusion.formulas import HALVES, NO_NORM
from stand.fusion.rotation_checks import check_heads, check_norm, check_rotation
from stand.gpu.kernels.launch import FLOATS, launch_device
from stand.gpu.kernels.norm import scale_normal

NUM_WARPS = 1  # a head per program: 128 values


@triton.jit
def turned_pair(values, others, cosines, sines, is_first):
    """Values turned with their partners, in their dtype; is_first: of a pair. Roundings are transformers' own."""
    dtype = values.dtype
    straight = (values.to(tl.float32) * cosines).to(dtype).to(tl.float32)
    crossed = (others.to(tl.float32) * tl.where(is_first, -sines, sines)).to(dtype).to(tl.float32)
    return (straight + crossed).to(dtype)


@triton.jit
def _turned(
    source, weight, cos, sin, second, eps,
    SIZE: tl.constexpr, HALF: tl.constexpr, PAIRING: tl.constexpr, RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head at `source`: normed under RULE (-1: not at all), rotated by the angles of its token, [BLOCK]."""
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    is_turned = columns < 2 * HALF
    is_first = columns < HALF if PAIRING == 0 else columns % 2 == 0
    partners = tl.where(is_first, columns + HALF, columns - HALF) if PAIRING == 0 else columns ^ 1
    partners = tl.where(is_turned, partners, columns)
    values = tl.load(source + columns, mask=inside, other=0.0)
    others = tl.load(source + partners, mask=inside, other=0.0)
    dtype = values.dtype
    if RULE != -1:
        wide = values.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
        own = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        theirs = tl.load(weight + partners, mask=inside, other=0.0).to(tl.float32)
        values = scale_normal(wide * scale, own, RULE, dtype)
        others = scale_normal(others.to(tl.float32) * scale, theirs, RULE, dtype)
    angles = tl.where(is_first, columns, columns - HALF + second)
    if PAIRING != 0:
        angles = columns // 2 if PAIRING == 1 else columns
    cosines = tl.load(cos + angles, mask=is_turned, other=1.0).to(tl.float32)
    sines = tl.load(sin + angles, mask=is_turned, other=0.0).to(tl.float32)
    return turned_pair(values, others, cosines, sines, is_first)


@triton.jit
def _rope_and_store(
    query, key, value, cos, sin, keys, values, slots, query_weight, key_weight, value_weight, output,
    query_stride, key_stride, value_stride, cos_stride, sin_stride, second,
    row_stride, head_stride, slot_stride, room, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, PAIRING: tl.constexpr,
    RULE: tl.constexpr, VALUE_RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token, head): heads are the query's, then the key's, then the value's."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    cos += token * cos_stride
    sin += token * sin_stride
    if head < HEADS:
        source = query + token * query_stride + head * SIZE
        turned = _turned(source, query_weight, cos, sin, second, eps, SIZE, HALF, PAIRING, RULE, BLOCK)
        tl.store(output + (token * HEADS + head) * SIZE + columns, turned, mask=inside)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            place = (slot // room) * row_stride + (slot % room) * slot_stride
            if head < HEADS + KV_HEADS:
                kv_head = (head - HEADS).to(tl.int64)
                source = key + token * key_stride + kv_head * SIZE
                turned = _turned(source, key_weight, cos, sin, second, eps, SIZE, HALF, PAIRING, RULE, BLOCK)
                tl.store(keys + place + kv_head * head_stride + columns, turned, mask=inside)
            else:
                kv_head = (head - HEADS - KV_HEADS).to(tl.int64)
                source = value + token * value_stride + kv_head * SIZE
                if VALUE_RULE == -1:
                    copied = tl.load(source + columns, mask=inside, other=0.0)
                else:
                    copied = _turned(source, value_weight, cos, sin, second, eps, SIZE, 0, 0, VALUE_RULE, BLOCK)
                tl.store(values + place + kv_head * head_stride + columns, copied, mask=inside)


@torch.library.custom_op("stand::rope_and_store", mutates_args=("keys", "values"))
def rope_and_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    rotary: int,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    eps: float,
    rule: int,
    value_weight: torch.Tensor | None = None,
    pairing: int = HALVES,
) -> torch.Tensor:
    """Rotate query and key, write key and value to the cache, return the query [M, H, D], contiguous.

    query [M, H, D], key, value [M, Hkv, D]: heads adjacent, tokens at any distance (slices of one merged output).
    cos, sin [M, rotary] or [M, rotary / 2] (one half, used for both), of the query's dtype. keys, values
    [R, Hkv, S, D]: the cache of one layer, any strides but adjacent D. slots [M] int64: row * S + slot of each token;
    a negative one is not written.
    rotary: leading components that turn; 0 leaves cos and sin unread.
    rule: how query_weight and key_weight [D] norm the heads first (`stand.fusion.formulas.RULES`), or NO_NORM; and
    value_weight [D] those of values, None where they stay as they are. pairing: one of `formulas.PAIRINGS`.
    """
    _check_dtype(query)
    check_heads(query, key, value, keys, values, slots)
    check_rotation(query, cos, sin, rotary, pairing)
    check_norm(query, query_weight, key_weight, rule, value_weight)
    tokens, heads, size = query.shape
    half = rotary // 2
    output = torch.empty((tokens, heads, size), dtype=query.dtype, device=query.device)
    with launch_device(_rope_and_store, query):
        _rope_and_store[(tokens, heads + 2 * key.shape[1])](
            query, key, value, cos, sin, keys, values, slots,
            query if query_weight is None else query_weight,  # not read without a norm
            key if key_weight is None else key_weight,
            value if value_weight is None else value_weight,
            output,
            query.stride(0), key.stride(0), value.stride(0), cos.stride(0), sin.stride(0),
            half if cos.shape[1] == rotary else 0,
            keys.stride(0), keys.stride(1), keys.stride(2), keys.shape[2], eps,
            HEADS=heads, KV_HEADS=key.shape[1], SIZE=size, HALF=half, PAIRING=pairing, RULE=rule,
            VALUE_RULE=NO_NORM if value_weight is None else rule,
            BLOCK=triton.next_power_of_2(size), num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return output


@rope_and_store.register_fake
def _(
    query, key, value, cos, sin, keys, values, slots, rotary, query_weight, key_weight, eps, rule, value_weight=None,
    pairing=HALVES,
):  # fmt: skip
    _check_dtype(query)
    check_heads(query, key, value, keys, values, slots)
    check_rotation(query, cos, sin, rotary, pairing)
    check_norm(query, query_weight, key_weight, rule, value_weight)
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def _check_dtype(query: torch.Tensor) -> None:
    if query.dtype not in FLOATS:
        raise ValueError(f"the query must be float32, bfloat16 or float16, got {query.dtype}; pass fuse=False")
