"""A linear layer for up to 16 tokens: every program reads some rows of the weights, or a part of their depth.

Such a product takes as long as its weights take to arrive, so enough programs must ask for them at once. Where the rows
are too few for that, their depth is split; the program that finishes a tile last adds the parts up in their order
(split-K, in one launch), so the result does not depend on who was last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import FLOATS, launch_device
from stand.gpu.tuning.product_tiles import MOST_TOKENS, TILES, ProductTile


@triton.jit
def is_last(arrivals, num_splits):
    """Whether all `num_splits` programs of a tile have stored their results; asked by each, after it has.

    arrivals: the tile's counter, int32, 0 before the first and 0 again after the last. The barrier puts the stores of
    all threads before the one thread's atomic operation; acquire and release carry them to the program that reads.
    """
    tl.debug_barrier()
    is_complete = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == num_splits - 1
    if is_complete:
        tl.store(arrivals, 0)
    return is_complete


@triton.jit
def _store_sum(result, bias, output, cells, rows, in_rows, mask, HAS_BIAS: tl.constexpr):
    """The sum with its bias, rounded once."""
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=in_rows, other=0.0).to(tl.float32)[None, :]
    tl.store(output + cells, result.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _few_token_product(
    states, weight, bias, partials, arrivals, output, num_tokens, num_splits, states_stride, num_rows, depth,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program (t, s): part s of the depth of tile t, ROWS rows of the weights.

    states [M, K]; weight [N, K]; bias [N] or anything; partials [S, M, N] float32; arrivals [>= tiles] int32; output
    [M, N].
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    tokens, columns = tl.arange(0, TOKENS), tl.arange(0, DEPTH)
    rows = tile * ROWS + tl.arange(0, ROWS)
    in_tokens, in_rows = tokens < num_tokens, rows < num_rows
    part_depth = tl.cdiv(tl.cdiv(depth, DEPTH), num_splits) * DEPTH
    first = split * part_depth
    end = tl.minimum(first + part_depth, depth)
    result = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(first, end, DEPTH):
        inside = start + columns < end
        known = tl.load(
            states + tokens[:, None] * states_stride + (start + columns)[None, :],
            mask=in_tokens[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        weights = tl.load(
            weight + rows.to(tl.int64)[:, None] * depth + (start + columns)[None, :],
            mask=in_rows[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        result = tl.dot(known, tl.trans(weights), result, input_precision="ieee")
    cells = tokens[:, None] * num_rows + rows[None, :]
    mask = in_tokens[:, None] & in_rows[None, :]
    if num_splits == 1:
        _store_sum(result, bias, output, cells, rows, in_rows, mask, HAS_BIAS)
    else:
        part_size = num_tokens * num_rows
        tl.store(partials + split * part_size + cells, result, mask=mask)
        if is_last(arrivals + tile, num_splits):
            total = tl.zeros([TOKENS, ROWS], tl.float32)
            for part in range(0, num_splits):
                total += tl.load(partials + part * part_size + cells, mask=mask, other=0.0)
            _store_sum(total, bias, output, cells, rows, in_rows, mask, HAS_BIAS)


@torch.library.custom_op("stand::few_token_product", mutates_args=("partials", "arrivals"))
def few_token_product(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, partials: torch.Tensor,
    arrivals: torch.Tensor, tile: int, num_splits: int,
) -> torch.Tensor:  # fmt: skip
    """states [..., K] @ weight [N, K]^T + bias [N] -> [..., N], summed in float32, for up to MOST_TOKENS tokens.

    All of one dtype, weight contiguous. partials: float32 scratch for num_splits * M * N numbers; arrivals: int32, one
    per tile of rows, zeros before and after. tile: which of `TILES`; num_splits: parts of the depth. Calls that share
    scratch must not run at once. Raises ValueError for other tensors.
    """
    sizes, known = TILES[tile], states.reshape(-1, states.shape[-1])
    _check(known, weight, bias, partials, arrivals, sizes, num_splits)
    known = known if known.stride(-1) == 1 else known.contiguous()
    output = torch.empty((*states.shape[:-1], len(weight)), dtype=states.dtype, device=states.device)
    with launch_device(_few_token_product, states):
        _few_token_product[(triton.cdiv(len(weight), sizes.rows), num_splits)](
            known, weight, weight if bias is None else bias, partials, arrivals, output, len(known), num_splits,
            known.stride(0), *weight.shape,
            TOKENS=MOST_TOKENS,
            ROWS=sizes.rows,
            DEPTH=sizes.depth,
            HAS_BIAS=bias is not None,
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
        )  # fmt: skip
    return output


@few_token_product.register_fake
def _(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, partials: torch.Tensor,
    arrivals: torch.Tensor, tile: int, num_splits: int,
) -> torch.Tensor:  # fmt: skip
    return torch.empty((*states.shape[:-1], len(weight)), dtype=states.dtype, device=states.device)


def _check(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, partials: torch.Tensor,
    arrivals: torch.Tensor, sizes: ProductTile, num_splits: int,
) -> None:  # fmt: skip
    """Shapes, dtypes and scratch; all of it known without a look at the device."""
    num_tokens, depth = states.shape
    fits = weight.dim() == 2 and weight.shape[1] == depth and weight.is_contiguous() and 1 <= num_tokens <= MOST_TOKENS
    fits_bias = bias is None or (bias.shape == weight.shape[:1] and bias.dtype == weight.dtype and bias.is_contiguous())
    if not fits or not fits_bias or weight.dtype != states.dtype or states.dtype not in FLOATS:
        raise ValueError(
            f"states [1 to {MOST_TOKENS}, K], a contiguous weight [N, K] and bias [N] of one dtype are needed, got "
            f"{list(states.shape)} {states.dtype}, {list(weight.shape)} {weight.dtype} and "
            f"{'no bias' if bias is None else list(bias.shape)}; call torch.nn.functional.linear"
        )
    num_tiles = triton.cdiv(len(weight), sizes.rows)
    needed = num_splits * num_tokens * len(weight) if num_splits > 1 else 0
    if num_splits < 1 or partials.numel() < needed or len(arrivals) < num_tiles:
        raise ValueError(
            f"{num_splits} splits of {num_tiles} tiles need partials for {needed} numbers and as many arrivals as "
            f"tiles, got {partials.numel()} and {len(arrivals)}; make them with stand.gpu.tuning.products.Products"
        )
