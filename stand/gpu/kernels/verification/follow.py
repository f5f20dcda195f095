"""Where every row stops, its next token and its kept path: what ends a step, one program per row.

Rules that draw a token at every node follow what was drawn from the root down. Other rules know where they stop; their
last kernel takes the path from here too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device


@triton.jit
def is_any_broken(laws, law_stride, first, end, BLOCK: tl.constexpr):
    """Whether a law of packed nodes first ... end - 1 is not finite, which its first column tells; 0 or 1."""
    nodes = first + tl.arange(0, BLOCK)
    column = tl.load(laws + nodes.to(tl.int64) * law_stride, mask=nodes < end, other=0.0)
    return tl.max((column != column).to(tl.int32), axis=0)


@triton.jit
def climbed(stop, first, parents, depths, BLOCK: tl.constexpr):
    """[BLOCK] int64: the row-local nodes at depths 1, 2, ... down to packed node `stop`; -1 below."""
    places = tl.arange(0, BLOCK)
    depth = tl.load(depths + stop).to(tl.int32)
    nodes, node = tl.full([BLOCK], -1, tl.int64), stop
    for step in range(0, depth):
        nodes = tl.where(places == depth - 1 - step, node - first, nodes)
        node = tl.load(parents + node)
    return nodes


@triton.jit
def _follow(
    drawn, laws, token_ids, parents, follows, offsets, stops, next_tokens, is_broken, path, law_stride, path_stride,
    max_depth, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): from the root to the first child whose token was drawn at its parent, as long as there is one."""
    row, places = tl.program_id(0), tl.arange(0, BLOCK)
    first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    inside = first + places < end
    above = (tl.load(parents + first + places, mask=inside, other=0) - first).to(tl.int32)
    tokens = tl.load(token_ids + first + places, mask=inside, other=0)
    may_follow = tl.load(follows + first + places, mask=inside, other=0) > 0
    nodes = tl.full([BLOCK], -1, tl.int64)
    node, depth = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    is_going = first < end
    while is_going:
        token = tl.load(drawn + first + node)
        child = tl.min(tl.where(may_follow & (above == node) & (tokens == token), places, BLOCK), axis=0)
        is_going = child < BLOCK
        nodes = tl.where(is_going & (places == depth), child.to(tl.int64), nodes)
        node = tl.where(is_going, child, node)
        depth += 1
    stop = tl.where(first < end, first + node, 0)
    tl.store(stops + row, stop.to(tl.int64))
    tl.store(next_tokens + row, tl.load(drawn + stop))
    tl.store(is_broken + row, is_any_broken(laws, law_stride, first, end, BLOCK))
    tl.store(path + row * path_stride + places, nodes, mask=places < max_depth)


@torch.library.custom_op("stand::follow", mutates_args=("stops", "next_tokens", "is_broken", "path"))
def follow(
    drawn: torch.Tensor,
    laws: torch.Tensor,
    token_ids: torch.Tensor,
    parents: torch.Tensor,
    follows: torch.Tensor,
    offsets: torch.Tensor,
    stops: torch.Tensor,
    next_tokens: torch.Tensor,
    is_broken: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """Write the verdict of rows whose nodes drew tokens `drawn` [M] int64.

    laws [M, V]: a node whose first entry is NaN breaks its row. token_ids, parents, follows [M] int64 and offsets
    [B + 1] int32 as in `StepPacket`. stops [B] int64: packed node where the row stops; next_tokens [B] int64: what was
    drawn there; is_broken [B] int32; path [B, P] int64, rows contiguous: row-local nodes kept at depths 1, 2, ..., then
    -1. No row has more than P nodes. A row without nodes stops at 0 with an empty path.
    """
    check_verdict(stops, next_tokens, is_broken, path, offsets)
    per_node = (drawn, token_ids, parents, follows)
    if any(one.dtype != torch.int64 or one.shape != drawn.shape or not one.is_contiguous() for one in per_node):
        raise ValueError(
            f"follow needs contiguous int64 arrays of one length, got {[(one.dtype, len(one)) for one in per_node]}; "
            "pass the packet's own"
        )
    with launch_device(_follow, drawn):
        _follow[(len(stops),)](
            drawn, laws, token_ids, parents, follows, offsets, stops, next_tokens, is_broken, path, laws.stride(0),
            path.stride(0), path.shape[1], BLOCK=triton.next_power_of_2(path.shape[1]), num_warps=1,
        )  # fmt: skip


@follow.register_fake
def _(drawn, laws, token_ids, parents, follows, offsets, stops, next_tokens, is_broken, path):
    return None


def check_verdict(stops, next_tokens, is_broken, path, offsets) -> None:
    """Raises ValueError unless these can take the verdict of as many rows as `offsets` [B + 1] int32 has."""
    num_rows = len(offsets) - 1
    is_shaped = stops.shape == next_tokens.shape == is_broken.shape == (num_rows,) and path.shape[:1] == (num_rows,)
    types = [one.dtype for one in (stops, next_tokens, is_broken, path, offsets)]
    is_typed = types == [torch.int64, torch.int64, torch.int32, torch.int64, torch.int32]
    if not (is_shaped and is_typed and path.stride(1) == 1):
        raise ValueError(
            f"a verdict on {num_rows} rows needs stops and next_tokens [B] and path [B, P] in int64, is_broken [B] and "
            f"offsets in int32, got {types} and a path {list(path.shape)}; take those of a StepOutput"
        )
