"""Traversal verification on the device: thresholds, what is owed, and where every row stops, without a wait.

The formulas are those of `stand.verifiers.rules.traversal`, in float64. A node's mass depends on its parent's after all
earlier siblings, so the host says in which turns a row's nodes can be settled (`turns` of `StepPacket`): 80 nodes of a
grown draft take about 30. Rows run side by side. What does not depend on the turns (the target's law on the supports,
each token's place in its parent's support) is gathered by all of the GPU first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device
from stand.gpu.packets.step_size import MAX_ROW_NODES

MIN_BLOCK_SLOTS = 16
GATHER_NODES = 8  # nodes per program of the gather
TILE_NODES = 32  # nodes at a time, of the thresholds
TURN_NODES = tl.constexpr(8)  # bytes of a turn
TINY = tl.constexpr(1e-12)  # a denominator below this is rounding


@triton.jit
def _gather(
    probs, law, support_ids, token_ids, parents, offsets, mass, tails, columns, inverse_laws, row_stride, width,
    BLOCK_NODES: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
):  # fmt: skip
    """Program (row, block of its nodes): p on the support into `mass`, p outside it, the token's slot and 1 / its law
    (0 where that is 0)."""
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
        inverse_law = tl.where(token_law > 0, 1.0 / tl.where(token_law > 0, token_law, 1.0), 0.0)
        tl.store(columns + nodes, column, mask=is_live)
        tl.store(inverse_laws + nodes, inverse_law, mask=is_live)


@triton.jit
def _load_turn(turn, law, parents, mass, columns, inverse_laws, first, width, BLOCK_SLOTS: tl.constexpr):
    """What settling does not change of a turn's nodes: (node, parent, column of its token and 1 / q there, q, p)."""
    local = ((turn >> (8 * tl.arange(0, TURN_NODES))) & 255).to(tl.int32)
    nodes, is_live, slots = first + local, local > 0, tl.arange(0, BLOCK_SLOTS)
    above = first + tl.load(parents + nodes, mask=is_live, other=0)
    column = tl.load(columns + nodes, mask=is_live, other=BLOCK_SLOTS)
    inverse_law = tl.load(inverse_laws + nodes, mask=is_live, other=0.0)
    cells, is_cell = nodes[:, None] * width + slots[None, :], is_live[:, None] & (slots < width)[None, :]
    own_law = tl.load(law + cells, mask=is_cell, other=0.0)
    target = tl.load(mass + cells, mask=is_cell, other=0.0)
    return nodes, above, column, inverse_law, own_law, target


@triton.jit
def _settle(law, parents, mass, scale, columns, inverse_laws, turns, first, end, width, BLOCK_SLOTS: tl.constexpr):
    """What every node of a row owes once all below it failed, turn by turn.

    `mass` holds p at nodes not reached yet and m at the others. A turn reads what earlier ones have stored, through
    other lanes, hence two barriers: one after its loads, before its stores may overwrite what a lane has still to load,
    and one after its stores, which makes them visible to the next turn's loads. What never changes is loaded one turn
    ahead, and the turns themselves two, so that only the parents' masses are waited for. One division per turn: they
    take longer than all else.
    """
    slots = tl.arange(0, BLOCK_SLOTS)
    tl.store(scale + first, tl.full((), 1.0, tl.float64))
    tl.debug_barrier()
    last = first + tl.load(turns + end - 1).to(tl.int32)
    turn = tl.load(turns + first, mask=first < last, other=0)
    next_turn = tl.load(turns + first + 1, mask=first + 1 < last, other=0)
    nodes, above, column, inverse_law, own_law, target = _load_turn(
        turn, law, parents, mass, columns, inverse_laws, first, width, BLOCK_SLOTS
    )
    for place in range(first, last):
        is_live = nodes > first
        is_cell = is_live[:, None] & (slots < width)[None, :]
        cells, cells_above = nodes[:, None] * width + slots[None, :], above[:, None] * width + slots[None, :]
        owed_above = tl.load(mass + cells_above, mask=is_cell, other=0.0)
        token_mass = tl.load(mass + above * width + column, mask=column < width, other=0.0)
        scale_above = tl.load(scale + above, mask=is_live, other=0.0)
        turn, next_turn = next_turn, tl.load(turns + place + 2, mask=place + 2 < last, other=0)
        next_nodes, next_above, next_column, next_inverse_law, next_law, next_target = _load_turn(
            turn, law, parents, mass, columns, inverse_laws, first, width, BLOCK_SLOTS
        )
        tl.debug_barrier()
        q = own_law.to(tl.float64)
        failure = 1.0 - tl.sum(tl.minimum(owed_above, q), axis=1)
        is_possible = failure > TINY
        factor = 1.0 / tl.where(is_possible, failure, 1.0)
        rest = tl.where(is_possible[:, None], tl.maximum(owed_above - q, 0.0) * factor[:, None], owed_above)
        inherited = tl.minimum(token_mass * inverse_law, 1.0)
        tl.store(mass + cells_above, rest, mask=is_cell)
        tl.store(scale + above, scale_above * factor, mask=is_live)
        tl.store(mass + cells, inherited[:, None] * target, mask=is_cell)
        tl.store(scale + nodes, inherited, mask=is_live)
        tl.debug_barrier()
        nodes, above, column, inverse_law = next_nodes, next_above, next_column, next_inverse_law
        own_law, target = next_law, next_target


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
def _either(one, other):
    return one | other


@triton.jit
def _first_in_post_order(passed, ancestors, parents, first, end, NUM_WORDS: tl.constexpr, BLOCK_ROW: tl.constexpr):
    """The row-local node where a walk from the root ends that steps to the first child at or below which a node passed,
    as long as there is one."""
    places = tl.arange(0, BLOCK_ROW)
    is_live = first + places < end
    leads = tl.zeros([BLOCK_ROW], tl.int64)  # whether a node at or below the place passed
    for word in tl.static_range(NUM_WORDS):
        bits = tl.load(ancestors + (first + places) * NUM_WORDS + word, mask=is_live & passed, other=0)
        seen = tl.reduce(bits, 0, _either)
        leads = tl.where(places // 64 == word, (seen >> (places % 64)) & 1, leads)
    above = tl.load(parents + first + places, mask=is_live & (leads != 0), other=-1)
    node, is_going = tl.zeros((), tl.int32), end > first
    while is_going:
        child = tl.min(tl.where(above == node, places, BLOCK_ROW), axis=0)
        is_going = child < BLOCK_ROW
        node = tl.where(is_going, child, node)
    return node


@triton.jit
def _traverse(
    law, parents, offsets, uniforms, tails, columns, inverse_laws, turns, ancestors, mass, scale, thresholds, stops,
    width, NUM_WORDS: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (row): settle, thresholds, then the first passing node in post-order."""
    row = tl.program_id(0)
    first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    stop = tl.zeros((), tl.int32)
    if first < end:
        _settle(law, parents, mass, scale, columns, inverse_laws, turns, first, end, width, BLOCK_SLOTS)
        _pass_thresholds(mass, scale, tails, thresholds, first, end, width, TILE, BLOCK_SLOTS)
        nodes = first + tl.arange(0, BLOCK_ROW)
        below = tl.load(uniforms + nodes, mask=nodes < end, other=1.0)
        passed = below < tl.load(thresholds + nodes, mask=nodes < end, other=0.0)
        stop = first + _first_in_post_order(passed, ancestors, parents, first, end, NUM_WORDS, BLOCK_ROW)
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
    turns: torch.Tensor,
    ancestors: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(stops [B] int64, mass [M, S], scale [M], thresholds [M], float64) of traversal verification.

    probs: [M, V] float32 or float64, rows contiguous. token_ids: [M] int32 or int64, parents: [M] int32 (row-local,
    parents before children, siblings in reveal order), offsets: [B + 1] int32, support_ids: [M, S] int32 (-1 is
    padding), law: [M, S] float32 or float64: as in DraftBatch. uniforms: [M] float64 in [0, 1); a node passes when its
    own lies below its threshold. turns [M], ancestors [M, W] int64: as in `StepPacket`. A row stops at packed node
    `stops`: the first passing in post-order, the root if no other. Its next token has weights `mass` on the stop's
    support and `scale` x p elsewhere.

    A row has at most 256 nodes; one without nodes stops at 0. Of nodes that belong to no row, mass, scale and
    thresholds are undefined. Ids must be below V: nothing here can raise on what the arrays hold.
    """
    _check_arguments(probs, token_ids, parents, offsets, support_ids, law, uniforms, turns, ancestors)
    (num_nodes, width), num_rows = law.shape, len(offsets) - 1
    stops, mass, scale, thresholds = _outputs(law, offsets)
    tails, inverse_laws, columns = torch.empty_like(scale), torch.empty_like(scale), torch.empty_like(parents)
    block_slots = max(MIN_BLOCK_SLOTS, triton.next_power_of_2(width))
    with launch_device(_traverse, probs):
        _gather[(num_rows, triton.cdiv(num_nodes, GATHER_NODES))](
            probs, law, support_ids, token_ids, parents, offsets, mass, tails, columns, inverse_laws,
            probs.stride(0), width, BLOCK_NODES=GATHER_NODES, BLOCK_SLOTS=block_slots, num_warps=4,
        )  # fmt: skip
        _traverse[(num_rows,)](
            law, parents, offsets, uniforms, tails, columns, inverse_laws, turns, ancestors, mass, scale, thresholds,
            stops, width, NUM_WORDS=ancestors.shape[1],
            BLOCK_ROW=min(triton.next_power_of_2(num_nodes), MAX_ROW_NODES), BLOCK_SLOTS=block_slots, TILE=TILE_NODES,
            num_warps=4, num_stages=1,
        )  # fmt: skip
    return stops, mass, scale, thresholds


@traverse.register_fake
def _(probs, token_ids, parents, offsets, support_ids, law, uniforms, turns, ancestors):
    return _outputs(law, offsets)


def _outputs(law: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    num_nodes, width = law.shape
    mass = law.new_empty((num_nodes, width), dtype=torch.float64)
    stops = offsets.new_empty((offsets.shape[0] - 1,), dtype=torch.int64)
    return stops, mass, law.new_empty((num_nodes,), dtype=torch.float64), mass.new_empty((num_nodes,))


def _check_arguments(probs, token_ids, parents, offsets, support_ids, law, uniforms, turns, ancestors) -> None:
    per_node = {"token_ids": token_ids, "parents": parents, "uniforms": uniforms, "turns": turns}
    shapes = {name: list(tensor.shape) for name, tensor in per_node.items()}
    rest = (*per_node.values(), offsets, support_ids, law, ancestors)
    is_packed = law.shape == support_ids.shape and all([len(law)] == shape for shape in shapes.values())
    is_packed = is_packed and ancestors.ndim == 2 and len(probs) == len(law) == len(ancestors)
    is_contiguous = probs.stride(1) == 1 and all(tensor.is_contiguous() for tensor in rest)
    is_typed = parents.dtype == offsets.dtype == support_ids.dtype == torch.int32 and uniforms.dtype == torch.float64
    if not (is_packed and is_contiguous and is_typed and turns.dtype == ancestors.dtype == torch.int64):
        raise ValueError(
            "traverse needs contiguous probs [M, V], law and support_ids [M, S], token_ids, parents, uniforms and "
            "turns [M] and ancestors [M, W], turns and ancestors in int64, other integers in int32 and uniforms in "
            f"float64, got probs {list(probs.shape)}, law {list(law.shape)}, support_ids {list(support_ids.shape)}, "
            f"ancestors {list(ancestors.shape)} and {shapes}; pass the packed arrays of one DraftBatch"
        )
