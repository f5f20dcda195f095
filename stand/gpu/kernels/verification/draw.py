"""The draws of `stand.verifiers.draw`, each in two launches: every node from its law, and the residual at a row's stop.

The sums are in float64: chunks of a law are summed side by side, then one program per draw picks the chunk and the
token. Of tokens without weight none is drawn, however sums are rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.verification.follow import check_verdict, climbed, is_any_broken

CHUNK = 1024  # tokens per program and per draw, 8 per thread
SLOTS = tl.constexpr(8)  # of a support, whose ids are loaded together


@triton.jit
def _first_above(weights, cumulated, point, places, BLOCK: tl.constexpr):
    """The first place with weight whose cumulated weight exceeds the point; the last one with weight if none does."""
    first = tl.min(tl.where((cumulated > point) & (weights > 0), places, BLOCK), axis=0)
    return tl.where(first < BLOCK, first, tl.max(tl.where(weights > 0, places, 0), axis=0))


@triton.jit
def _sum_law_chunk(probs, sums, row_stride, vocabulary_size, BLOCK: tl.constexpr):
    """Program (node, chunk): the chunk's mass."""
    node, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    law = tl.load(probs + node * row_stride + tokens, mask=tokens < vocabulary_size, other=0.0)
    tl.store(sums + node * tl.num_programs(1) + chunk, tl.sum(law.to(tl.float64), axis=0))


@triton.jit
def _draw_node(
    probs, uniforms, sums, drawn, row_stride, vocabulary_size, num_chunks,
    BLOCK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (node): the first token whose cumulated mass exceeds uniform x total."""
    node, chunks, places = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_CHUNKS), tl.arange(0, BLOCK)
    mass_of = tl.load(sums + node * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    point = tl.load(uniforms + node) * tl.sum(mass_of, axis=0)
    chunk = _first_above(mass_of, tl.cumsum(mass_of, axis=0), point, chunks, BLOCK_CHUNKS)
    before = tl.sum(tl.where(chunks < chunk, mass_of, 0.0), axis=0)
    tokens = chunk * BLOCK + places
    law = tl.load(probs + node * row_stride + tokens, mask=tokens < vocabulary_size, other=0.0).to(tl.float64)
    token = chunk * BLOCK + _first_above(law, tl.cumsum(law, axis=0), point - before, places, BLOCK)
    tl.store(drawn + node, token.to(tl.int64))


@triton.jit
def _rest_of_chunk(probs, tokens, support, vocabulary_size, width):
    """p of a chunk's tokens in float64, and the same without the support's `width` ids."""
    law = tl.load(probs + tokens, mask=tokens < vocabulary_size, other=0.0).to(tl.float64)
    rest = law
    for first in range(0, width, SLOTS):
        for slot in tl.static_range(SLOTS):
            rest = tl.where(tokens == tl.load(support + first + slot, mask=first + slot < width, other=-1), 0.0, rest)
    return law, rest


@triton.jit
def _sum_chunk(
    probs, stops, support_ids, whole_sums, rest_sums, row_stride, vocabulary_size, width, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row, chunk): the chunk's mass at the row's stop, and what of it lies outside the support."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    stop, tokens = tl.load(stops + row), chunk * BLOCK + tl.arange(0, BLOCK)
    support = support_ids + stop * width
    whole, rest = _rest_of_chunk(probs + stop * row_stride, tokens, support, vocabulary_size, width)
    place = row * tl.num_programs(1) + chunk
    tl.store(whole_sums + place, tl.sum(whole, axis=0))
    tl.store(rest_sums + place, tl.sum(rest, axis=0))


@triton.jit
def _draw(
    probs, stops, support_ids, mass, scale, uniforms, whole_sums, rest_sums, parents, depths, offsets, final_stops,
    next_tokens, is_broken, path, row_stride, vocabulary_size, width, num_chunks, path_stride, max_depth,
    BLOCK: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BLOCK_ROW: tl.constexpr,
):  # fmt: skip
    """Program (row). Where all weights are zero, the token comes from p itself. Writes the rest of the verdict too."""
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
        tokens, support = chunk * BLOCK + places, support_ids + stop * width
        whole, rest = _rest_of_chunk(probs + stop * row_stride, tokens, support, vocabulary_size, width)
        values = tl.where(is_empty, whole, rest)
        token = chunk * BLOCK + _first_above(values, tl.cumsum(values, axis=0), point - before, places, BLOCK)
    tl.store(final_stops + row, stop)
    tl.store(next_tokens + row, token.to(tl.int64))
    first, end, places = tl.load(offsets + row), tl.load(offsets + row + 1), tl.arange(0, BLOCK_ROW)
    tl.store(is_broken + row, is_any_broken(probs, row_stride, first, end, BLOCK_ROW))
    nodes = climbed(stop, first, parents, depths, BLOCK_ROW)
    tl.store(path + row * path_stride + places, nodes, mask=places < max_depth)


@torch.library.custom_op("stand::draw_nodes", mutates_args=())
def draw_nodes(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[M] int64: a token per law, ids in ascending order, the first whose cumulated mass exceeds uniform x total.

    probs: [M, V] float32 or float64, rows contiguous; uniforms: [M] float64 in [0, 1). A law of zeros or NaN gives 0.
    """
    if probs.ndim != 2 or probs.stride(1) != 1 or uniforms.shape != probs.shape[:1] or uniforms.dtype != torch.float64:
        raise ValueError(
            f"draw_nodes needs probs [M, V] with contiguous rows and uniforms [M] float64, got {list(probs.shape)} "
            f"with strides {probs.stride()} and {list(uniforms.shape)} in {uniforms.dtype}; pass one uniform per node"
        )
    num_nodes, vocabulary_size = probs.shape
    num_chunks = triton.cdiv(vocabulary_size, CHUNK)
    sums = uniforms.new_empty((num_nodes, num_chunks))
    drawn = uniforms.new_empty((num_nodes,), dtype=torch.int64)
    with launch_device(_draw_node, probs):
        _sum_law_chunk[(num_nodes, num_chunks)](probs, sums, probs.stride(0), vocabulary_size, BLOCK=CHUNK, num_warps=4)
        _draw_node[(num_nodes,)](
            probs, uniforms, sums, drawn, probs.stride(0), vocabulary_size, num_chunks, BLOCK=CHUNK,
            BLOCK_CHUNKS=triton.next_power_of_2(num_chunks), num_warps=4,
        )  # fmt: skip
    return drawn


@draw_nodes.register_fake
def _(probs, uniforms):
    return uniforms.new_empty(uniforms.shape, dtype=torch.int64)


@torch.library.custom_op("stand::draw_residuals", mutates_args=("final_stops", "next_tokens", "is_broken", "path"))
def draw_residuals(
    probs: torch.Tensor,
    stops: torch.Tensor,
    support_ids: torch.Tensor,
    mass: torch.Tensor,
    scale: torch.Tensor,
    uniforms: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    offsets: torch.Tensor,
    final_stops: torch.Tensor,
    next_tokens: torch.Tensor,
    is_broken: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """Write the verdict of rows that stop at packed nodes `stops` [B] int64, a copy of these included.

    probs: [M, V] float32 or float64, rows contiguous; support_ids: [M, S] int32 (-1 is padding), mass: [M, S] and
    scale: [M] float64, as `traverse` gives them; uniforms: [B] float64 in [0, 1); parents, depths [M] int64 and offsets
    [B + 1] int32 as in `StepPacket`. next_tokens [B]: drawn from weights {mass on the stop's support, scale x p
    elsewhere}, from p where all weights are zero. is_broken [B], path [B, P]: as `follow` writes them.
    """
    _check_arguments(probs, stops, support_ids, mass, scale, uniforms, parents, depths)
    check_verdict(final_stops, next_tokens, is_broken, path, offsets)
    (_, vocabulary_size), width, num_rows = probs.shape, support_ids.shape[1], len(stops)
    num_chunks = triton.cdiv(vocabulary_size, CHUNK)
    whole_sums = mass.new_empty((num_rows, num_chunks))
    rest_sums = torch.empty_like(whole_sums)
    sizes = (probs.stride(0), vocabulary_size, width)
    blocks = {"BLOCK": CHUNK, "num_warps": 4}
    with launch_device(_sum_chunk, probs):
        _sum_chunk[(num_rows, num_chunks)](probs, stops, support_ids, whole_sums, rest_sums, *sizes, **blocks)
        _draw[(num_rows,)](
            probs, stops, support_ids, mass, scale, uniforms, whole_sums, rest_sums, parents, depths, offsets,
            final_stops, next_tokens, is_broken, path, *sizes, num_chunks, path.stride(0), path.shape[1],
            BLOCK_SLOTS=triton.next_power_of_2(width), BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
            BLOCK_ROW=triton.next_power_of_2(path.shape[1]), **blocks,
        )  # fmt: skip


@draw_residuals.register_fake
def _(
    probs, stops, support_ids, mass, scale, uniforms, parents, depths, offsets, final_stops, next_tokens, is_broken,
    path,
):  # fmt: skip
    return None


def _check_arguments(probs, stops, support_ids, mass, scale, uniforms, parents, depths) -> None:
    is_packed = support_ids.shape == mass.shape == (len(probs), support_ids.shape[1]) and scale.shape == probs.shape[:1]
    rest = (stops, support_ids, mass, scale, uniforms, parents, depths)
    is_contiguous = probs.stride(1) == 1 and all(tensor.is_contiguous() for tensor in rest)
    types = [tensor.dtype for tensor in rest]
    if not (is_packed and is_contiguous and parents.shape == depths.shape == scale.shape) or types != [
        torch.int64, torch.int32, torch.float64, torch.float64, torch.float64, torch.int64, torch.int64,
    ]:  # fmt: skip
        raise ValueError(
            "draw_residuals needs contiguous probs [M, V], stops [B] int64, support_ids [M, S] int32, mass [M, S], "
            "scale [M] and uniforms [B] float64, parents and depths [M] int64, got "
            f"{[list(tensor.shape) for tensor in (probs, *rest)]} in {types}; pass what traverse returns and the "
            "packet's own"
        )
