"""The best tokens of every node, which the lookup learns from: top-k over the vocabulary, in the best chunks alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device

CHUNK = 2048  # tokens per program, 16 per thread: they stay in registers over all turns
MAX_COUNT = 16
NOTHING = tl.constexpr(-(2**63))  # below every key
LOWEST_WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def sort_keys(values, tokens):
    """int64 that order like (value, then the lower id): the float's bits made monotone above, the id inverted below."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)  # -0 ties with 0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (tokens.to(tl.int64) ^ LOWEST_WORD)


@triton.jit
def token_of(key):
    return ((key & LOWEST_WORD) ^ LOWEST_WORD).to(tl.int32)


@triton.jit
def value_of(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _keys_of_chunk(probs, row, chunk, vocabulary_size, row_stride, BLOCK: tl.constexpr):
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary_size
    values = tl.load(probs + row.to(tl.int64) * row_stride + tokens, mask=inside, other=0.0)
    return tl.where(inside, sort_keys(values, tokens), NOTHING)


@triton.jit
def _largest_in_chunk(probs, largest, vocabulary_size, row_stride, BLOCK: tl.constexpr):
    """Program (row, chunk): the chunk's largest key."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    keys = _keys_of_chunk(probs, row, chunk, vocabulary_size, row_stride, BLOCK)
    tl.store(largest + row * tl.num_programs(1) + chunk, tl.max(keys, axis=0))


@triton.jit
def _best_in_chunk(
    probs, largest, best, vocabulary_size, row_stride, num_chunks, count,
    BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (row, place): of the chunk whose largest key is the place-th of the row, the `count` largest keys, one
    repeated maximum each."""
    row, place = tl.program_id(0), tl.program_id(1)
    chunks = tl.arange(0, BLOCK_CHUNKS)
    largest_of = tl.load(largest + row * num_chunks + chunks, mask=chunks < num_chunks, other=NOTHING)
    key = tl.max(largest_of, axis=0)
    for _ in range(0, place):
        key = tl.max(tl.where(largest_of < key, largest_of, NOTHING), axis=0)
    keys = _keys_of_chunk(probs, row, token_of(key) // BLOCK, vocabulary_size, row_stride, BLOCK)
    for rank in range(0, count):
        tl.store(best + (row * tl.num_programs(1) + place) * count + rank, key)
        key = tl.max(tl.where(keys < key, keys, NOTHING), axis=0)


@triton.jit
def _best_of_chunks(best, ids, values, num_candidates, count, BLOCK: tl.constexpr):
    """Program (row): the `count` largest of the chunks' keys, decoded."""
    row = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    keys = tl.load(best + row * num_candidates + places, mask=places < num_candidates, other=NOTHING)
    for rank in range(0, count):
        largest = tl.max(keys, axis=0)
        tl.store(ids + row * count + rank, token_of(largest))
        tl.store(values + row * count + rank, value_of(largest))
        keys = tl.where(keys == largest, NOTHING, keys)


@torch.library.custom_op("stand::top_tokens", mutates_args=())
def top_tokens(probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [M, count] int32, values [M, count] float32): the largest entries of probs [M, V], in descending order.

    probs: float32, rows contiguous; any values, not only probabilities. Of equal values the lowest ids come first.
    1 <= count <= 16 and count <= V.
    """
    _check_arguments(probs, count)
    (num_rows, vocabulary_size), (ids, values) = probs.shape, _outputs(probs, count)
    num_chunks = triton.cdiv(vocabulary_size, CHUNK)
    num_searched = min(num_chunks, count)  # no other chunk's largest key is among the best, so no other key is
    num_candidates = num_searched * count
    largest = probs.new_empty((num_rows, num_chunks), dtype=torch.int64)
    best = probs.new_empty((num_rows, num_candidates), dtype=torch.int64)
    sizes = (vocabulary_size, probs.stride(0))
    with launch_device(_best_in_chunk, probs):
        _largest_in_chunk[(num_rows, num_chunks)](probs, largest, *sizes, BLOCK=CHUNK, num_warps=4)
        _best_in_chunk[(num_rows, num_searched)](
            probs, largest, best, *sizes, num_chunks, count, BLOCK=CHUNK,
            BLOCK_CHUNKS=triton.next_power_of_2(num_chunks), num_warps=4,
        )  # fmt: skip
        _best_of_chunks[(num_rows,)](
            best, ids, values, num_candidates, count, BLOCK=triton.next_power_of_2(num_candidates), num_warps=4
        )
    return ids, values


@top_tokens.register_fake
def _(probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(probs, count)


def _outputs(probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = probs.new_empty((probs.shape[0], count), dtype=torch.int32)
    return ids, probs.new_empty((probs.shape[0], count))


def _check_arguments(probs: torch.Tensor, count: int) -> None:
    if probs.ndim != 2 or probs.dtype != torch.float32 or probs.stride(1) != 1:
        raise ValueError(
            f"top_tokens needs [M, V] in float32 with contiguous rows, got {list(probs.shape)} in {probs.dtype} with "
            f"strides {probs.stride()}; convert it first"
        )
    if not 1 <= count <= min(MAX_COUNT, probs.shape[1]):
        raise ValueError(
            f"count must be in [1, {min(MAX_COUNT, probs.shape[1])}] for {probs.shape[1]} tokens, got {count}; "
            "ask for fewer, or use torch.topk"
        )
