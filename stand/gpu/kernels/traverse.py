"""Traversal verification on the device: thresholds, what is owed, and where every row stops, without a wait.

The formulas are those of `stand.verifiers.rules.traversal`, in float64. A node's mass depends on its parent's after all
earlier siblings, so a row is one chain of steps in node order; rows run side by side. What does not depend on the chain
(the target's law on the supports, each token's place in its parent's support) is gathered by all of the GPU first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.specimen import Specimen

MIN_BLOCK_SLOTS = 16
GATHER_NODES = 8  # nodes per program of the gather
TILE_NODES = 32  # nodes per turn of the thresholds
TINY = tl.constexpr(1e-12)  # a denominator below this is rounding


@triton.jit
def _gather(
    probs, law, support_ids, token_ids, parents, offsets, mass, tails, columns, token_laws, row_stride, width,
    BLOCK_NODES: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
):  # fmt: skip
    """Program (row, block of its nodes): p on the support into `mass`, p outside it, and the token's slot and law."""
    row = tl.program_id(0)
    first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    nodes = first + tl.program_id(1) * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
    if first + tl.program_id(1) * BLOCK_NODES < end:
        is_live = nodes < end
        slots = tl.arange(0, BLOCK_SLOTS)
        cells = nodes[:, None] * width + slots[None, :]
        is_cell = is_live[:, None] & (slots < width)[None, :]
        own = tl.load(support_ids + cells, mask=is_cell, other=-1)
        target = tl.load(probs + nodes.to(tl.int64)[:, None] * row_stride + own, mask=own >= 0, other=0.0)
        target = target.to(tl.float64)
        tl.store(mass + cells, target, mask=is_cell)
        tl.store(tails + nodes, tl.maximum(1.0 - tl.sum(target, axis=1), 0.0), mask=is_live)
        parent = tl.load(parents + nodes, mask=is_live, other=-1)
        parent_cells = (first + parent)[:, None] * width + slots[None, :]
        known = tl.load(support_ids + parent_cells, mask=is_cell & (parent >= 0)[:, None], other=-1)
        token = tl.load(token_ids + nodes, mask=is_live, other=0)
        column = tl.min(tl.where(known == token[:, None], slots[None, :], BLOCK_SLOTS), axis=1)
        laws = tl.load(law + cells, mask=is_cell, other=0.0).to(tl.float64)
        token_law = tl.sum(tl.where(slots[None, :] == column[:, None], laws, 0.0), axis=1)
        tl.store(columns + nodes, column, mask=is_live)
        tl.store(token_laws + nodes, token_law, mask=is_live)


@triton.jit
def _settle(law, parents, mass, scale, columns, token_laws, first, end, width, BLOCK_SLOTS: tl.constexpr):
    """What every node of a row owes once all below it failed, in node order.

    `mass` holds p at nodes not reached yet and m at the others. A node reads what an earlier one has stored, through
    other lanes, hence two barriers per node: one after its loads, before its stores may overwrite what a lane has
    still to load, and one after its stores, which makes them visible to the next node's loads. What never changes is
    loaded one node ahead, so that only the parent's mass is waited for.
    """
    slots = tl.arange(0, BLOCK_SLOTS)
    inside = slots < width
    tl.store(scale + first, tl.full((), 1.0, tl.float64))
    tl.debug_barrier()
    node = first + 1
    more = node < end
    parent = tl.load(parents + node, mask=more, other=0)
    column = tl.load(columns + node, mask=more, other=0)
    token_law = tl.load(token_laws + node, mask=more, other=0.0)
    own_law = tl.load(law + node * width + slots, mask=inside & more, other=0.0)
    target = tl.load(mass + node * width + slots, mask=inside & more, other=0.0)
    for node in range(first + 1, end):
        above = first + parent
        owed_above = tl.load(mass + above * width + slots, mask=inside, other=0.0)
        token_mass = tl.load(mass + above * width + column, mask=column < width, other=0.0)
        scale_above = tl.load(scale + above)
        q, q_of_token, p = own_law.to(tl.float64), token_law, target
        more = node + 1 < end
        parent = tl.load(parents + node + 1, mask=more, other=0)
        column = tl.load(columns + node + 1, mask=more, other=0)
        token_law = tl.load(token_laws + node + 1, mask=more, other=0.0)
        own_law = tl.load(law + (node + 1) * width + slots, mask=inside & more, other=0.0)
        target = tl.load(mass + (node + 1) * width + slots, mask=inside & more, other=0.0)
        tl.debug_barrier()
        is_drawn = q_of_token > 0
        inherited = tl.where(is_drawn, tl.minimum(token_mass / tl.where(is_drawn, q_of_token, 1.0), 1.0), 0.0)
        failure = 1.0 - tl.sum(tl.minimum(owed_above, q), axis=0)
        is_possible = failure > TINY
        divisor = tl.where(is_possible, failure, 1.0)
        rest = tl.where(is_possible, tl.maximum(owed_above - q, 0.0) / divisor, owed_above)
        tl.store(mass + above * width + slots, rest, mask=inside)
        tl.store(scale + above, scale_above / divisor)
        tl.store(mass + node * width + slots, inherited * p, mask=inside)
        tl.store(scale + node, inherited)
        tl.debug_barrier()


@triton.jit
def _pass_thresholds(mass, scale, tails, thresholds, first, end, width, TILE: tl.constexpr, BLOCK_SLOTS: tl.constexpr):
    """h = min(1, sum m + s (1 - sum p)) at the nodes of a row, 1 at its root."""
    slots = tl.arange(0, BLOCK_SLOTS)
    for start in range(first, end, TILE):
        nodes = start + tl.arange(0, TILE)
        is_live = nodes < end
        cells = nodes[:, None] * width + slots[None, :]
        owed = tl.load(mass + cells, mask=is_live[:, None] & (slots < width)[None, :], other=0.0)
        beyond = tl.load(scale + nodes, mask=is_live, other=0.0) * tl.load(tails + nodes, mask=is_live, other=0.0)
        threshold = tl.where(nodes == first, 1.0, tl.minimum(tl.sum(owed, axis=1) + beyond, 1.0))
        tl.store(thresholds + nodes, threshold, mask=is_live)
    tl.debug_barrier()


@triton.jit
def _traverse(
    law, parents, offsets, uniforms, tails, columns, token_laws, mass, scale, thresholds, stops, width,
    BLOCK_ROW: tl.constexpr, BLOCK_SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (row), one warp: settle, thresholds, then the first passing node in post-order.

    The last is one backward sweep in which each node overwrites its parent's answer: what stays at a node is the answer
    of the first child that has one, else its own.
    """
    row = tl.program_id(0)
    first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    stop = tl.zeros((), tl.int32)
    if first < end:
        _settle(law, parents, mass, scale, columns, token_laws, first, end, width, BLOCK_SLOTS)
        _pass_thresholds(mass, scale, tails, thresholds, first, end, width, TILE, BLOCK_SLOTS)
        places = tl.arange(0, BLOCK_ROW)
        is_live = first + places < end
        below = tl.load(uniforms + first + places, mask=is_live, other=1.0)
        passed = below < tl.load(thresholds + first + places, mask=is_live, other=0.0)
        answers = tl.where(passed | (places == 0), places, -1)
        for step in range(1, end - first):
            place = end - first - step
            parent = tl.load(parents + first + place)
            answer = tl.max(tl.where(places == place, answers, -1), axis=0)
            answers = tl.where((places == parent) & (answer >= 0), answer, answers)
        stop = first + tl.max(tl.where(places == 0, answers, -1), axis=0)
    tl.store(stops + row, stop.to(tl.int64))


@torch.library.custom_op("stand::traverse", mutates_args=())
def traverse(
    probs: torch.Tensor,
    token_ids: torch.Tensor,
    parents: torch.Tensor,
    offsets: torch.Tensor,
    support_ids: torch.Tensor,
    law: torch.Tensor,
    uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(stops [B] int64, mass [M, S], scale [M], thresholds [M], float64) of traversal verification.

    probs: [M, V] float32 or float64, rows contiguous. token_ids: [M] int32 or int64, parents: [M] int32 (row-local,
    parents before children, siblings in reveal order), offsets: [B + 1] int32, support_ids: [M, S] int32 (-1 is
    padding), law: [M, S] float32 or float64: as in DraftBatch. uniforms: [M] float64 in [0, 1); a node passes when its
    own lies below its threshold. A row stops at packed node `stops`: the first passing in post-order, the root if no
    other. Its next token has weights `mass` on the stop's support and `scale` x p elsewhere.

    A row without nodes stops at 0. Of nodes that belong to no row, mass, scale and thresholds are undefined. Ids must
    be below V: nothing here can raise on what the arrays hold.
    """
    _check_arguments(probs, token_ids, parents, offsets, support_ids, law, uniforms)
    (num_nodes, width), num_rows = law.shape, len(offsets) - 1
    stops, mass, scale, thresholds = _outputs(law, offsets)
    tails, token_laws, columns = torch.empty_like(scale), torch.empty_like(scale), torch.empty_like(parents)
    block_slots = max(MIN_BLOCK_SLOTS, triton.next_power_of_2(width))
    with launch_device(_traverse, probs):
        _gather[(num_rows, triton.cdiv(num_nodes, GATHER_NODES))](
            probs, law, support_ids, token_ids, parents, offsets, mass, tails, columns, token_laws,
            probs.stride(0), width, BLOCK_NODES=GATHER_NODES, BLOCK_SLOTS=block_slots, num_warps=4,
        )  # fmt: skip
        _traverse[(num_rows,)](
            law, parents, offsets, uniforms, tails, columns, token_laws, mass, scale, thresholds, stops, width,
            BLOCK_ROW=triton.next_power_of_2(num_nodes), BLOCK_SLOTS=block_slots, TILE=TILE_NODES, num_warps=1,
            num_stages=1,
        )  # fmt: skip
    return stops, mass, scale, thresholds


@traverse.register_fake
def _(probs, token_ids, parents, offsets, support_ids, law, uniforms):
    return _outputs(law, offsets)


def _outputs(law: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    num_nodes, width = law.shape
    mass = law.new_empty((num_nodes, width), dtype=torch.float64)
    stops = offsets.new_empty((offsets.shape[0] - 1,), dtype=torch.int64)
    return stops, mass, law.new_empty((num_nodes,), dtype=torch.float64), mass.new_empty((num_nodes,))


def _check_arguments(probs, token_ids, parents, offsets, support_ids, law, uniforms) -> None:
    per_node = {"token_ids": token_ids, "parents": parents, "uniforms": uniforms}
    shapes = {name: list(tensor.shape) for name, tensor in per_node.items()}
    rest = (*per_node.values(), offsets, support_ids, law)
    is_packed = law.shape == support_ids.shape and all([len(law)] == shape for shape in shapes.values())
    is_contiguous = probs.stride(1) == 1 and all(tensor.is_contiguous() for tensor in rest)
    is_typed = parents.dtype == offsets.dtype == support_ids.dtype == torch.int32 and uniforms.dtype == torch.float64
    if not (is_packed and len(probs) == len(law) and is_contiguous and is_typed):
        raise ValueError(
            "traverse needs contiguous probs [M, V], law and support_ids [M, S], token_ids, parents and uniforms [M], "
            f"integers in int32 and uniforms in float64, got probs {list(probs.shape)}, law {list(law.shape)}, "
            f"support_ids {list(support_ids.shape)} and {shapes}; pass the packed arrays of one DraftBatch"
        )


def specimens() -> list[Specimen]:
    """Both kernels as launched for up to 256 nodes with supports of up to 16 tokens."""
    drafted = {"law": "*fp32", "support_ids": "*i32", "token_ids": "*i64", "parents": "*i32", "offsets": "*i32"}
    gathered = {"mass": "*fp64", "tails": "*fp64", "columns": "*i32", "token_laws": "*fp64"}
    results = {"uniforms": "*fp64", "scale": "*fp64", "thresholds": "*fp64", "stops": "*i64"}
    gather = {"probs": "*fp32", **drafted, **gathered, "row_stride": "i32", "width": "i32"}
    walked = {"law": "*fp32", "parents": "*i32", "offsets": "*i32", **gathered, **results, "width": "i32"}
    return [
        Specimen("traverse_gather", _gather, gather, {"BLOCK_NODES": GATHER_NODES, "BLOCK_SLOTS": 16}, num_warps=4),
        Specimen(
            "traverse",
            _traverse,
            walked,
            {"BLOCK_ROW": 256, "BLOCK_SLOTS": 16, "TILE": TILE_NODES},
            num_warps=1,
            num_stages=1,
        ),
    ]
