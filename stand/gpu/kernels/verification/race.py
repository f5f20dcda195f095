"""The coupled draw: argmax_x p(x) / E(x) for every node of a step, noise and all, in one pass over the laws.

The noise is that of `stand.verifiers.noise`: one 64-bit key per node, the token mixed in, the same 52 bits on every
device. Zeros are where most of a filtered law lies, and a chunk that holds nothing else costs its read alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device

CHUNK = 1024  # tokens per program: enough programs to fill a GPU with one node, 8 tokens per thread
GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def finalise(word):
    """SplitMix64's finaliser on uint64 (noise.h)."""
    word = (word ^ (word >> 30)) * FIRST_FACTOR
    word = (word ^ (word >> 27)) * SECOND_FACTOR
    return word ^ (word >> 31)


@triton.jit
def token_uniforms(key, tokens):
    """float64 in (0, 1), one per token id (int32); `key` (int64) is the step key before the token is mixed in."""
    words = tokens.to(tl.uint64) << 32
    bits = finalise(key.to(tl.uint64, bitcast=True) + (words + 1) * GOLDEN_GAMMA)
    return ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52


@triton.jit
def _race_in_chunk(probs, keys, best_scores, best_tokens, vocabulary_size, row_stride, BLOCK: tl.constexpr):
    """Program (row, chunk): the chunk's best race and its token, ties to the lowest id."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    law = tl.load(probs + row.to(tl.int64) * row_stride + tokens, mask=tokens < vocabulary_size, other=0.0)
    law = law.to(tl.float64)
    score, at = tl.max(law, axis=0), tl.zeros((), tl.int32)
    if score > 0:
        uniforms = token_uniforms(tl.load(keys + row), tokens)
        scores = tl.where(law > 0, law / -tl.log(uniforms), 0.0)
        score, at = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    place = row * tl.num_programs(1) + chunk
    tl.store(best_scores + place, score)
    tl.store(best_tokens + place, chunk * BLOCK + at)


@triton.jit
def _best_of_chunks(best_scores, best_tokens, winners, num_chunks, BLOCK: tl.constexpr):
    """Program (row): chunks ascend, so the first of equal ones holds the lowest id."""
    row = tl.program_id(0)
    chunks = tl.arange(0, BLOCK)
    scores = tl.load(best_scores + row * num_chunks + chunks, mask=chunks < num_chunks, other=-1.0)
    _, at = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(winners + row, tl.load(best_tokens + row * num_chunks + at).to(tl.int64))


@torch.library.custom_op("stand::race", mutates_args=())
def race(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[M] int64: argmax_x probs[i, x] / E(keys[i], x), E = -log u exponential noise; ties to the lowest id.

    probs: [M, V] float32 or float64, rows contiguous; keys: [M] int64, the bits of `VerifierNoise.step_keys`. The race
    is run in float64. A token of probability 0 never wins; a row of zeros or NaN gives 0.
    """
    _check_arguments(probs, keys)
    num_rows, vocabulary_size = probs.shape
    num_chunks = triton.cdiv(vocabulary_size, CHUNK)
    best_scores = probs.new_empty((num_rows, num_chunks), dtype=torch.float64)
    best_tokens = probs.new_empty((num_rows, num_chunks), dtype=torch.int32)
    winners = torch.empty_like(keys)
    with launch_device(_race_in_chunk, probs):
        _race_in_chunk[(num_rows, num_chunks)](
            probs, keys, best_scores, best_tokens, vocabulary_size, probs.stride(0), BLOCK=CHUNK, num_warps=4
        )
        _best_of_chunks[(num_rows,)](
            best_scores, best_tokens, winners, num_chunks, BLOCK=triton.next_power_of_2(num_chunks), num_warps=1
        )
    return winners


@race.register_fake
def _(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(keys)


def _check_arguments(probs: torch.Tensor, keys: torch.Tensor) -> None:
    if probs.ndim != 2 or probs.stride(1) != 1 or keys.shape != probs.shape[:1] or keys.dtype != torch.int64:
        raise ValueError(
            f"race needs probs [M, V] with contiguous rows and keys [M] int64, got {list(probs.shape)} with strides "
            f"{probs.stride()} and {list(keys.shape)} in {keys.dtype}; pass one key per node"
        )
