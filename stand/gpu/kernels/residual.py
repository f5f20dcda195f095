"""The token after a row's stop, from {mass on the stop's support, scale x p elsewhere}, in two launches for all rows.

The weights are those of `stand.verifiers.draw`, in float64: chunks of a row are summed side by side, then one program
per row picks the part, the chunk and the token. Of tokens without weight none is drawn, however sums are rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.specimen import Specimen

CHUNK = 1024  # tokens per program and per draw, 8 per thread
MIN_BLOCK_SLOTS = 16


@triton.jit
def _rest_of_chunk(probs, tokens, ids, vocabulary_size, BLOCK_SLOTS: tl.constexpr):
    """p of a chunk's tokens in float64, and the same without the support."""
    law = tl.load(probs + tokens, mask=tokens < vocabulary_size, other=0.0).to(tl.float64)
    is_on_support = tl.max((tokens[:, None] == ids[None, :]).to(tl.int32), axis=1) > 0
    return law, tl.where(is_on_support, 0.0, law)


@triton.jit
def _sum_chunk(
    probs, stops, support_ids, whole_sums, rest_sums, row_stride, vocabulary_size, width,
    BLOCK: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the chunk's mass at the row's stop, and what of it lies outside the support."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    stop, slots = tl.load(stops + row), tl.arange(0, BLOCK_SLOTS)
    ids = tl.load(support_ids + stop * width + slots, mask=slots < width, other=-1)
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    whole, rest = _rest_of_chunk(probs + stop * row_stride, tokens, ids, vocabulary_size, BLOCK_SLOTS)
    place = row * tl.num_programs(1) + chunk
    tl.store(whole_sums + place, tl.sum(whole, axis=0))
    tl.store(rest_sums + place, tl.sum(rest, axis=0))


@triton.jit
def _first_above(weights, cumulated, point, places, BLOCK: tl.constexpr):
    """The first place with weight whose cumulated weight exceeds the point; the last one with weight if none does."""
    first = tl.min(tl.where((cumulated > point) & (weights > 0), places, BLOCK), axis=0)
    return tl.where(first < BLOCK, first, tl.max(tl.where(weights > 0, places, 0), axis=0))


@triton.jit
def _draw(
    probs, stops, support_ids, mass, scale, uniforms, whole_sums, rest_sums, tokens_out, row_stride, vocabulary_size,
    width, num_chunks, BLOCK: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (row). Where all weights are zero, the token comes from p itself."""
    row = tl.program_id(0)
    stop, uniform = tl.load(stops + row), tl.load(uniforms + row)
    slots, chunks = tl.arange(0, BLOCK_SLOTS), tl.arange(0, BLOCK_CHUNKS)
    ids = tl.load(support_ids + stop * width + slots, mask=slots < width, other=-1)
    owed = tl.load(mass + stop * width + slots, mask=(slots < width) & (ids >= 0), other=0.0)
    factor = tl.load(scale + stop)
    is_chunk = chunks < num_chunks
    rests = tl.load(rest_sums + row * num_chunks + chunks, mask=is_chunk, other=0.0)
    wholes = tl.load(whole_sums + row * num_chunks + chunks, mask=is_chunk, other=0.0)
    support_cdf = tl.cumsum(owed, axis=0)
    on_support = tl.sum(owed, axis=0)
    weights = on_support + factor * tl.sum(rests, axis=0)
    is_empty = ~(weights > 0)
    point = uniform * weights
    if (point < on_support) & ~is_empty:
        slot = _first_above(owed, support_cdf, point, slots, BLOCK_SLOTS)
        token = tl.sum(tl.where(slots == slot, ids, 0), axis=0)
    else:
        sums = tl.where(is_empty, wholes, rests)
        point = tl.where(
            is_empty, uniform * tl.sum(wholes, axis=0), (point - on_support) / tl.where(factor > 0, factor, 1.0)
        )
        cumulated = tl.cumsum(sums, axis=0)
        chunk = _first_above(sums, cumulated, point, chunks, BLOCK_CHUNKS)
        before = tl.sum(tl.where(chunks < chunk, sums, 0.0), axis=0)
        places = tl.arange(0, BLOCK)
        whole, rest = _rest_of_chunk(
            probs + stop * row_stride, chunk * BLOCK + places, ids, vocabulary_size, BLOCK_SLOTS
        )
        values = tl.where(is_empty, whole, rest)
        token = chunk * BLOCK + _first_above(values, tl.cumsum(values, axis=0), point - before, places, BLOCK)
    tl.store(tokens_out + row, token.to(tl.int64))


@torch.library.custom_op("stand::draw_residuals", mutates_args=())
def draw_residuals(
    probs: torch.Tensor,
    stops: torch.Tensor,
    support_ids: torch.Tensor,
    mass: torch.Tensor,
    scale: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """[B] int64: the token after stopping at packed nodes `stops` [B] int64.

    probs: [M, V] float32 or float64, rows contiguous; support_ids: [M, S] int32 (-1 is padding), mass: [M, S] and
    scale: [M] float64, as `traverse` gives them; uniforms: [B] float64 in [0, 1). A row whose weights are all zero is
    drawn from its law.
    """
    _check_arguments(probs, stops, support_ids, mass, scale, uniforms)
    (_, vocabulary_size), width, num_rows = probs.shape, support_ids.shape[1], len(stops)
    num_chunks = triton.cdiv(vocabulary_size, CHUNK)
    whole_sums = mass.new_empty((num_rows, num_chunks))
    rest_sums, tokens = torch.empty_like(whole_sums), torch.empty_like(stops)
    sizes = (probs.stride(0), vocabulary_size, width)
    blocks = {"BLOCK": CHUNK, "BLOCK_SLOTS": max(MIN_BLOCK_SLOTS, triton.next_power_of_2(width)), "num_warps": 4}
    with launch_device(_sum_chunk, probs):
        _sum_chunk[(num_rows, num_chunks)](probs, stops, support_ids, whole_sums, rest_sums, *sizes, **blocks)
        _draw[(num_rows,)](
            probs, stops, support_ids, mass, scale, uniforms, whole_sums, rest_sums, tokens, *sizes, num_chunks,
            BLOCK_CHUNKS=triton.next_power_of_2(num_chunks), **blocks,
        )  # fmt: skip
    return tokens


@draw_residuals.register_fake
def _(probs, stops, support_ids, mass, scale, uniforms):
    return torch.empty_like(stops)


def _check_arguments(probs, stops, support_ids, mass, scale, uniforms) -> None:
    is_packed = support_ids.shape == mass.shape == (len(probs), support_ids.shape[1]) and scale.shape == probs.shape[:1]
    rest = (stops, support_ids, mass, scale, uniforms)
    is_contiguous = probs.stride(1) == 1 and all(tensor.is_contiguous() for tensor in rest)
    types = [tensor.dtype for tensor in rest]
    if not (is_packed and is_contiguous and stops.shape == uniforms.shape) or types != [
        torch.int64, torch.int32, torch.float64, torch.float64, torch.float64,
    ]:  # fmt: skip
        raise ValueError(
            "draw_residuals needs contiguous probs [M, V], stops [B] int64, support_ids [M, S] int32, mass [M, S], "
            f"scale [M] and uniforms [B] float64, got {[list(tensor.shape) for tensor in (probs, *rest)]} in {types}; "
            "pass what traverse returns"
        )


def specimens() -> list[Specimen]:
    """Both kernels as launched for 152,064 tokens (149 chunks) and supports of up to 16."""
    law = {"probs": "*fp32", "stops": "*i64", "support_ids": "*i32"}
    sums = {"whole_sums": "*fp64", "rest_sums": "*fp64"}
    sizes = {"row_stride": "i32", "vocabulary_size": "i32", "width": "i32"}
    owed = {"mass": "*fp64", "scale": "*fp64", "uniforms": "*fp64", "tokens_out": "*i64", "num_chunks": "i32"}
    blocks = {"BLOCK": CHUNK, "BLOCK_SLOTS": 16}
    return [
        Specimen("residual_sum_chunk", _sum_chunk, {**law, **sums, **sizes}, blocks),
        Specimen("residual_draw", _draw, {**law, **owed, **sums, **sizes}, {**blocks, "BLOCK_CHUNKS": 256}),
    ]
