"""The experts of a layer that mixes them (Shazeer et al., 2017, arXiv 1701.06538): a token goes through the few experts
that its router chose, and their results are added up by its shares.

Each expert is a feed-forward block: a product with the rows of gate and up, the gate, a product with the rows of down.
Results are rounded where transformers' `grouped_mm_experts_forward` rounds: after a product, after its bias, after each
operation of the gate, and after the share. Pairs of a token and an expert are sorted by expert first (`pairs.py`), so
that a program reads the weights of one expert. One token needs no sorting: there a program adds up what the others
have stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.fusion.formulas import EXPERT_ACTIVATIONS, MOST_EXPERT_TOKENS, RELU_SQUARED
from stand.gpu.kernels.launch import FLOATS, launch_device
from stand.gpu.kernels.pairs import find_tile, sort_pairs
from stand.gpu.kernels.product import is_last
from stand.gpu.kernels.proxy_fence import MUST_ADD_FENCES, fences_added
from stand.gpu.kernels.swiglu import activate, sigmoid
from stand.gpu.tuning.expert_tiles import MOST_CHOSEN, ExpertTile, expert_tile

BLOCK = 1024


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _gated(gate, up, alpha, limit, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Of gate and up in float32, rounded to DTYPE after each operation. NaN stays NaN."""
    if ACTIVATION == 3:
        gate = _rounded(tl.where(gate > limit, limit, gate), DTYPE)
        up = _rounded(tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)), DTYPE)
        opened = _rounded(gate * _rounded(sigmoid(_rounded(gate * alpha, DTYPE)), DTYPE), DTYPE)
        return (_rounded(up + 1.0, DTYPE) * opened).to(DTYPE)
    else:
        return (_rounded(activate(gate, ACTIVATION), DTYPE) * up).to(DTYPE)


@triton.jit
def _tile_of(experts, starts, tile, num_experts, TOKENS: tl.constexpr, BLOCK_E: tl.constexpr, IS_SINGLE: tl.constexpr):
    """(expert, first place, end of places) as `find_tile`; of a single token every pair is a tile, that of no expert
    too, which any one stands for."""
    if IS_SINGLE:
        return tl.minimum(tl.load(experts + tile), num_experts - 1), tile, tile + 1
    else:
        expert, first, end = find_tile(starts, tile, num_experts, TOKENS, BLOCK_E)
        return expert.to(tl.int64), first, end


@triton.jit
def _product(
    known, is_known, weight, is_row, depth, depth_stride,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """[TOKENS, ROWS] float32: rows of states, `depth` adjacent numbers from pointers known [TOKENS], times rows of the
    weights, `depth` numbers `depth_stride` apart from pointers weight [ROWS]."""
    columns = tl.arange(0, DEPTH)
    result = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(0, depth, DEPTH):
        inside = start + columns < depth
        states = tl.load(
            known[:, None] + (start + columns)[None, :], mask=is_known[:, None] & inside[None, :], other=0.0
        )
        weights = tl.load(
            weight[None, :] + (start + columns)[:, None] * depth_stride,
            mask=inside[:, None] & is_row[None, :], other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        result = tl.dot(states, weights, result, input_precision="ieee")
    return result


@triton.jit
def _with_bias(result, bias, rows, is_row, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """Rounded to DTYPE as a product, and again with its bias."""
    result = result.to(DTYPE)
    if HAS_BIAS:
        added = tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + added[None, :]).to(DTYPE)
    return result


@triton.jit
def _up(
    states, experts, order, starts, weight, bias, active, arrivals,
    num_experts, chosen, size, depth, row_stride, depth_stride, num_arrivals, alpha, limit,
    ACTIVATION: tl.constexpr, IS_INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SINGLE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_E: tl.constexpr, ADDS_FENCES: tl.constexpr,
):  # fmt: skip
    """Program (tile, block): of the pairs of a tile, ROWS rows of the first weights, and what the gate makes of them.

    states [M, H]; weight [E, R, H] by its strides, bias [E, R] or anything; active [P, I], in sorted order. A tile of
    the product holds a block of gate rows and the same block of up rows, side by side as they lie: alternating, or one
    block behind the other. arrivals: set to zero for `_down`.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    HAS_GATE: tl.constexpr = ACTIVATION != 4
    COLUMNS: tl.constexpr = ROWS // 2 if HAS_GATE else ROWS
    DTYPE: tl.constexpr = active.dtype.element_ty
    if IS_SINGLE:
        if tile == 0:
            for place in range(block, num_arrivals, tl.num_programs(1)):
                tl.store(arrivals + place, 0)
    expert, first, end = _tile_of(experts, starts, tile, num_experts, TOKENS, BLOCK_E, IS_SINGLE)
    if expert >= num_experts:
        return
    places = first + tl.arange(0, TOKENS)
    is_place = places < end
    numbers, columns = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    num_rows = 2 * size if HAS_GATE else size
    if HAS_GATE and not IS_INTERLEAVED:
        own = block * COLUMNS + numbers % COLUMNS
        rows, is_row = numbers // COLUMNS * size + own, own < size
    else:
        rows = block * ROWS + numbers
        is_row = rows < num_rows
    if IS_SINGLE:
        tokens = tl.zeros([TOKENS], tl.int32)
    else:
        tokens = tl.load(order + places, mask=is_place, other=0) // chosen
    result = _product(
        states + tokens.to(tl.int64) * depth, is_place, weight + expert * num_rows * depth + rows * row_stride, is_row,
        depth, depth_stride, TOKENS, ROWS, DEPTH,
    )  # fmt: skip
    result = _with_bias(result, bias + expert * num_rows, rows, is_row, HAS_BIAS, DTYPE)
    if HAS_GATE:
        if IS_INTERLEAVED:
            gate, up = tl.split(tl.reshape(result, [TOKENS, COLUMNS, 2]))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(result, [TOKENS, 2, COLUMNS]), (0, 2, 1)))
        values = _gated(gate.to(tl.float32), up.to(tl.float32), alpha, limit, ACTIVATION, DTYPE)
    else:
        values = result.to(tl.float32)
        values = tl.where(values < 0, 0.0, values)
        values = (values * values).to(DTYPE)
    cells = places.to(tl.int64)[:, None] * size + columns[None, :]
    tl.store(active + cells, values, mask=is_place[:, None] & (columns < size)[None, :])


@triton.jit
def _down(
    active, experts, order, starts, shares, weight, bias, parts, arrivals, output,
    num_experts, size, depth, row_stride, depth_stride,
    CHOSEN: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SINGLE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_E: tl.constexpr, ADDS_FENCES: tl.constexpr,
):  # fmt: skip
    """Program (tile, block): of the pairs of a tile, ROWS numbers of their experts' results, times their shares.

    active [P, I] in sorted order; shares [P]; weight [E, H, I] by its strides, bias [E, H] or anything; parts [P, H] by
    pair. Of a single token the program that is last with its numbers adds them up: output [1, H].
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    expert, first, end = _tile_of(experts, starts, tile, num_experts, TOKENS, BLOCK_E, IS_SINGLE)
    if expert >= num_experts:
        return
    places = first + tl.arange(0, TOKENS)
    is_place = places < end
    rows = block * ROWS + tl.arange(0, ROWS)
    is_row = rows < size
    result = _product(
        active + places.to(tl.int64) * depth, is_place, weight + expert * size * depth + rows * row_stride, is_row,
        depth, depth_stride, TOKENS, ROWS, DEPTH,
    )  # fmt: skip
    result = _with_bias(result, bias + expert * size, rows, is_row, HAS_BIAS, active.dtype.element_ty)
    if IS_SINGLE:
        pairs = places
    else:
        pairs = tl.load(order + places, mask=is_place, other=0)
    share = tl.load(shares + pairs, mask=is_place, other=0.0).to(tl.float32)
    values = (result.to(tl.float32) * share[:, None]).to(parts.dtype.element_ty)
    cells = pairs.to(tl.int64)[:, None] * size + rows[None, :]
    tl.store(parts + cells, values, mask=is_place[:, None] & is_row[None, :])
    if IS_SINGLE:
        if is_last(arrivals + block, CHOSEN):
            _store_total(parts, experts, output, rows, is_row, size, num_experts, CHOSEN)


@triton.jit
def _store_total(parts, experts, output, columns, inside, size, num_experts, CHOSEN: tl.constexpr):
    """The sum of a token's parts, in float32, in their order, but for those of no expert: `num_experts` or more."""
    total = tl.zeros(columns.shape, tl.float32)
    for number in tl.static_range(CHOSEN):
        is_there = tl.load(experts + number) < num_experts
        total += tl.load(parts + number * size + columns, mask=inside & is_there, other=0.0).to(tl.float32)
    tl.store(output + columns, total.to(parts.dtype.element_ty).to(output.dtype.element_ty), mask=inside)


@triton.jit
def _sum_shares(parts, experts, output, size, num_experts, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, block): BLOCK columns of parts [M * k, H] to output [M, H]."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _store_total(
        parts + token * CHOSEN * size, experts + token * CHOSEN, output + token * size, columns, columns < size, size,
        num_experts, CHOSEN,
    )  # fmt: skip


@torch.library.custom_op("stand::mixed_experts", mutates_args=())
def mixed_experts(
    states: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor,
    up: torch.Tensor, up_bias: torch.Tensor | None, down: torch.Tensor, down_bias: torch.Tensor | None,
    activation: int, is_transposed: bool, is_interleaved: bool, alpha: float, limit: float,
) -> torch.Tensor:  # fmt: skip
    """[M, H] in the states' dtype: of each token the sum over j of shares[j] * expert experts[j] of its states.

    states [M, H] of up to MOST_EXPERT_TOKENS tokens; experts [M, k] int64, 0 or more, E or more for none; shares [M, k]
    in float32 or the states' dtype. up: [E, 2 I, H], all gate rows before all up rows, or alternating where
    `is_interleaved`; without a gate (RELU_SQUARED) [E, I, H]. down: [E, H, I]. is_transposed: the last two dimensions
    of both are swapped. Biases: [E, 2 I] (or [E, I]) and [E, H]. activation: one of `EXPERT_ACTIVATIONS`; alpha and
    limit are those of CLAMPED. All contiguous; sums are in float32. A token's result depends on no other token but by
    the tile that is chosen for their number. Raises ValueError for other tensors.
    """
    _check(states, experts, shares, up, up_bias, down, down_bias, activation, is_transposed)
    (num_tokens, hidden), chosen, num_experts = states.shape, experts.shape[1], len(up)
    sizes = expert_tile(
        num_tokens, chosen, num_experts, is_transposed=is_transposed, is_float32=states.dtype == torch.float32
    )
    is_single = num_tokens == 1
    order, starts = (experts, experts) if is_single else sort_pairs(experts, num_experts)
    size = down.shape[1 if is_transposed else 2]
    num_tiles = chosen if is_single else sizes.num_tiles(num_tokens * chosen, num_experts)
    dtype = torch.float32 if shares.dtype == torch.float32 else states.dtype  # torch's of their product
    active = torch.empty(num_tokens * chosen, size, dtype=states.dtype, device=states.device)
    parts = torch.empty(num_tokens * chosen, hidden, dtype=dtype, device=states.device)
    output = torch.empty_like(states)
    num_blocks = triton.cdiv(hidden, sizes.rows)
    arrivals = torch.empty(num_blocks, dtype=torch.int32, device=states.device)
    shared = _constants(sizes, num_experts, is_single)
    with launch_device(_up, states), fences_added():
        columns = sizes.rows if activation == RELU_SQUARED else sizes.rows // 2
        _up[(num_tiles, triton.cdiv(size, columns))](
            states, experts, order, starts, up, up if up_bias is None else up_bias, active, arrivals,
            num_experts, chosen, size, hidden, *_strides(up, is_transposed), num_blocks, alpha, limit,
            ACTIVATION=activation, IS_INTERLEAVED=is_interleaved, HAS_BIAS=up_bias is not None, **shared,
        )  # fmt: skip
        _down[(num_tiles, num_blocks)](
            active, experts, order, starts, shares, down, down if down_bias is None else down_bias, parts, arrivals,
            output, num_experts, hidden, size, *_strides(down, is_transposed),
            CHOSEN=chosen, HAS_BIAS=down_bias is not None, **shared,
        )  # fmt: skip
        if not is_single:
            _sum_shares[(num_tokens, triton.cdiv(hidden, BLOCK))](
                parts, experts, output, hidden, num_experts, CHOSEN=chosen, BLOCK=BLOCK
            )
    return output


@mixed_experts.register_fake
def _(
    states, experts, shares, up, up_bias, down, down_bias, activation, is_transposed, is_interleaved, alpha, limit
):  # fmt: skip
    _check(states, experts, shares, up, up_bias, down, down_bias, activation, is_transposed)
    return torch.empty_like(states)


def _constants(sizes: ExpertTile, num_experts: int, is_single: bool) -> dict[str, int | bool]:
    """What both products are compiled and launched with."""
    return {
        "IS_SINGLE": is_single,
        "TOKENS": sizes.tokens,
        "ROWS": sizes.rows,
        "DEPTH": sizes.depth,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "ADDS_FENCES": MUST_ADD_FENCES,
        "num_warps": sizes.num_warps,
        "num_stages": sizes.num_stages,
    }


def _strides(weight: torch.Tensor, is_transposed: bool) -> tuple[int, int]:
    """Of rows and of their depth."""
    row, depth = weight.stride()[1:]
    return (depth, row) if is_transposed else (row, depth)


def _check(
    states: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor,
    up: torch.Tensor, up_bias: torch.Tensor | None, down: torch.Tensor, down_bias: torch.Tensor | None,
    activation: int, is_transposed: bool,
) -> None:  # fmt: skip
    """Shapes, dtypes and layouts; all of it known without a look at the device."""
    if activation not in EXPERT_ACTIVATIONS:
        raise ValueError(
            f"activation must be one of {EXPERT_ACTIVATIONS}, got {activation}; they are in stand.fusion.formulas"
        )
    given = [one for one in (states, experts, shares, up, up_bias, down, down_bias) if one is not None]
    if not all(one.is_contiguous() for one in given):
        layouts = ", ".join(f"{list(one.shape)} by {list(one.stride())}" for one in given)
        raise ValueError(f"all tensors must be contiguous, got {layouts}; use the module's own forward")
    weights = [one for one in (up, up_bias, down, down_bias) if one is not None]
    is_known = states.dtype in FLOATS and all(one.dtype == states.dtype for one in weights)
    if not is_known or experts.dtype != torch.int64 or shares.dtype not in (torch.float32, states.dtype):
        raise ValueError(
            "states and weights must share a dtype of float32, bfloat16 and float16, experts must be int64, and shares "
            f"of that dtype or float32, got {', '.join(str(one.dtype) for one in given)}; use the module's own forward"
        )
    _check_routes(states, experts, shares)
    _check_shapes(states, up, up_bias, down, down_bias, activation, is_transposed)


def _check_routes(states: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor) -> None:
    fits = states.dim() == experts.dim() == 2 and len(states) == len(experts) and shares.shape == experts.shape
    if not fits or not 1 <= len(states) <= MOST_EXPERT_TOKENS or not 1 <= experts.shape[1] <= MOST_CHOSEN:
        raise ValueError(
            f"states [1 to {MOST_EXPERT_TOKENS}, H], and experts and shares [the same, 1 to {MOST_CHOSEN}] are needed, "
            f"got {list(states.shape)}, {list(experts.shape)} and {list(shares.shape)}; use the module's own forward"
        )


def _check_shapes(
    states: torch.Tensor, up: torch.Tensor, up_bias: torch.Tensor | None, down: torch.Tensor,
    down_bias: torch.Tensor | None, activation: int, is_transposed: bool,
) -> None:  # fmt: skip
    hidden, rows_per_column = states.shape[1], 1 if activation == RELU_SQUARED else 2
    size = down.shape[1 if is_transposed else 2] if down.dim() == 3 else 0
    rows = rows_per_column * size
    expected = {
        "up": (len(up), *((hidden, rows) if is_transposed else (rows, hidden))),
        "down": (len(up), *((size, hidden) if is_transposed else (hidden, size))),
        "up_bias": (len(up), rows),
        "down_bias": (len(up), hidden),
    }
    given = {"up": up, "down": down, "up_bias": up_bias, "down_bias": down_bias}
    got = {name: tuple(one.shape) for name, one in given.items() if one is not None}
    if any(shape != expected[name] for name, shape in got.items()) or not size or rows * hidden >= 2**31:
        raise ValueError(
            f"for states of {hidden} numbers and activation {activation} weights must be as {expected}, and fewer than "
            f"2^31 numbers an expert, got {got}; use the module's own forward"
        )
