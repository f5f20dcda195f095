"""Rotary positions of queries and of one key in a launch, where keys are not written to the cache as they are.

Su et al., RoFormer, arXiv 2104.09864, equation 34. Component i pairs with component i + T / 2; where pairs come side by
side (DeepSeek), components 2 i and 2 i + 1 are a pair and go to i and i + T / 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import FLOATS, launch_device
from stand.gpu.kernels.rope import turned_pair

NUM_WARPS = 1


@triton.jit
def _rotate_pair(
    query, key, cos, sin, turned_query, turned_key, query_token, query_head, key_token, key_head, cos_token, sin_token,
    num_tokens, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Program (token, head): heads are the query's, then the key's."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    HALF: tl.constexpr = SIZE // 2
    is_first = columns < HALF
    pair = tl.where(is_first, columns, columns - HALF)
    if IS_INTERLEAVED:
        own, partners, angles = 2 * pair + tl.where(is_first, 0, 1), 2 * pair + tl.where(is_first, 1, 0), pair
    else:
        own, partners, angles = columns, tl.where(is_first, columns + HALF, columns - HALF), columns
    if head < HEADS:
        source = query + token * query_token + head * query_head
        target = turned_query + (head * num_tokens + token) * SIZE
    else:
        source = key + token * key_token + (head - HEADS) * key_head
        target = turned_key + ((head - HEADS) * num_tokens + token) * SIZE
    values = tl.load(source + own, mask=inside, other=0.0)
    others = tl.load(source + partners, mask=inside, other=0.0)
    cosines = tl.load(cos + token * cos_token + angles, mask=inside, other=0.0).to(tl.float32)
    sines = tl.load(sin + token * sin_token + angles, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + columns, turned_pair(values, others, cosines, sines, is_first), mask=inside)


@torch.library.custom_op("stand::rotate_pair", mutates_args=())
def rotate_pair(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query [H, M, T] and key [K, M, T], turned and contiguous.

    cos, sin [M, T]: both halves alike, of which `is_interleaved` reads the first. All of one dtype of float32, bfloat16
    and float16 with adjacent components. Raises ValueError for others.
    """
    _check(query, key, cos, sin)
    heads, num_tokens, size = query.shape
    turned = query.new_empty(query.shape), key.new_empty(key.shape)
    with launch_device(_rotate_pair, query):
        _rotate_pair[(num_tokens, heads + len(key))](
            query, key, cos, sin, *turned, query.stride(1), query.stride(0), key.stride(1), key.stride(0),
            cos.stride(0), sin.stride(0), num_tokens, HEADS=heads, SIZE=size, BLOCK=triton.next_power_of_2(size),
            IS_INTERLEAVED=is_interleaved, num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return turned


@rotate_pair.register_fake
def _(query, key, cos, sin, is_interleaved):
    _check(query, key, cos, sin)
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _check(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    tensors = (query, key, cos, sin)
    size = query.shape[-1]
    has_shapes = query.ndim == key.ndim == 3 and key.shape[1:] == query.shape[1:] and size % 2 == 0
    has_tables = cos.shape == sin.shape == query.shape[1:]
    dtypes = {tensor.dtype for tensor in tensors}
    is_read = len(dtypes) == 1 and query.dtype in FLOATS and all(tensor.stride(-1) == 1 for tensor in tensors)
    if not (has_shapes and has_tables and is_read):
        got = ", ".join(f"{list(tensor.shape)} in {tensor.dtype}" for tensor in tensors)
        raise ValueError(
            "rotate_pair needs query [H, M, T], key [K, M, T], cos and sin [M, T] of one dtype of float32, bfloat16 "
            f"and float16, T even and adjacent, got {got}; use the module's own forward"
        )
