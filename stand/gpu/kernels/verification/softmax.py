"""From logits to laws in two passes: 2 + 2 + 4 bytes per half-precision logit, whatever the number of rows.

A cast, a division, a softmax of rows too long for shared memory and a copy to where the laws are kept move about 40,
and a softmax with one block per row leaves most of a GPU idle while a step has few rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device

CHUNK = 2048  # logits per program, 16 per thread


@triton.jit
def _scaled(logits, row_stride, vocabulary_size, temperature, tokens):
    """A row's chunk in float32, divided by the temperature; -inf beyond the vocabulary, NaN where it was +inf."""
    place = logits + tl.program_id(0).to(tl.int64) * row_stride + tokens
    values = tl.load(place, mask=tokens < vocabulary_size, other=float("-inf"))
    values = tl.where(values == float("inf"), float("nan"), values.to(tl.float32))
    return tl.math.div_rn(values, temperature)


@triton.jit
def _exponentials(scaled, largest):
    """exp(scaled - largest), where nothing but -inf is known 0 and not NaN."""
    return tl.exp(scaled - tl.where(largest == float("-inf"), 0.0, largest))


@triton.jit
def _sum_chunk(logits, maxima, sums, row_stride, vocabulary_size, temperature, BLOCK: tl.constexpr):
    """Program (row, chunk): the chunk's maximum and its sum of exponentials below it."""
    chunk = tl.program_id(1)
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    scaled = _scaled(logits, row_stride, vocabulary_size, temperature, tokens)
    largest = tl.max(scaled, axis=0)
    place = tl.program_id(0) * tl.num_programs(1) + chunk
    tl.store(maxima + place, largest)
    tl.store(sums + place, tl.sum(_exponentials(scaled, largest), axis=0))


@triton.jit
def _normalise_chunk(
    logits, maxima, sums, laws, row_stride, law_stride, vocabulary_size, temperature,
    BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): merge all chunks' sums, then write this chunk's probabilities."""
    row, num_chunks = tl.program_id(0), tl.num_programs(1)
    chunks = tl.arange(0, BLOCK_CHUNKS)
    largest_of = tl.load(maxima + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
    sum_of = tl.load(sums + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    largest = tl.max(largest_of, axis=0)
    total = tl.sum(sum_of * _exponentials(largest_of, largest), axis=0)
    total = tl.where(total > 0, total, float("nan"))
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scaled = _scaled(logits, row_stride, vocabulary_size, temperature, tokens)
    probabilities = tl.math.div_rn(_exponentials(scaled, largest), total)
    tl.store(laws + row.to(tl.int64) * law_stride + tokens, probabilities, mask=tokens < vocabulary_size)


@torch.library.custom_op("stand::softmax_rows", mutates_args=("laws",))
def softmax_rows(laws: torch.Tensor, logits: torch.Tensor, temperature: float) -> None:
    """Write softmax(logits / temperature) into `laws` [M, V] float32.

    logits: [M, V] of any float type but float64, rows of both contiguous; temperature > 0. A row with NaN, +inf or
    nothing but -inf becomes NaN throughout, so that its first column tells.
    """
    _check_arguments(laws, logits, temperature)
    num_rows, vocabulary_size = logits.shape
    num_chunks = triton.cdiv(vocabulary_size, CHUNK)
    maxima = laws.new_empty((num_rows, num_chunks))
    sums = torch.empty_like(maxima)
    sizes = {"row_stride": logits.stride(0), "vocabulary_size": vocabulary_size, "temperature": temperature}
    with launch_device(_sum_chunk, logits):
        _sum_chunk[(num_rows, num_chunks)](logits, maxima, sums, **sizes, BLOCK=CHUNK, num_warps=4)
        _normalise_chunk[(num_rows, num_chunks)](
            logits, maxima, sums, laws, law_stride=laws.stride(0), **sizes,
            BLOCK=CHUNK, BLOCK_CHUNKS=triton.next_power_of_2(num_chunks), num_warps=4,
        )  # fmt: skip


@softmax_rows.register_fake
def _(laws: torch.Tensor, logits: torch.Tensor, temperature: float) -> None:
    return None


def _check_arguments(laws: torch.Tensor, logits: torch.Tensor, temperature: float) -> None:
    is_law = laws.dtype == torch.float32 and laws.shape == logits.shape and laws.ndim == 2
    is_float = logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not is_law or not is_float or laws.stride(1) != 1 or logits.stride(1) != 1:
        raise ValueError(
            "softmax_rows needs logits [M, V] in float32, bfloat16 or float16 and laws [M, V] in float32, rows "
            f"contiguous, got {list(logits.shape)} in {logits.dtype} and {list(laws.shape)} in {laws.dtype}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; take the best token for greedy decoding")
