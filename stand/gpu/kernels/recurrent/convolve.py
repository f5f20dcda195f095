"""Short convolutions over trees: every token with those before it on its path, and before its row's root with the
newest committed ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.swiglu import activate

BLOCK_TOKENS, BLOCK_CHANNELS = 16, 64


@triton.jit(do_not_specialize=["num_tokens"])
def _convolve(
    inputs, tails, weight, bias, parents, depths, offsets, cache_rows, mixed, num_tokens, num_channels,
    stride_token, stride_channel,
    SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Program (row, block of channels, share of the row's tokens). The sum is rounded before the activation, as by two
    operations; padding is shared out among all rows."""
    row, channels = tl.program_id(0), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    share, num_shares = tl.program_id(2), tl.num_programs(2)
    first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    row_tails = tails + tl.load(cache_rows + row).to(tl.int64) * (SIZE - 1) * num_channels
    is_channel = channels < num_channels
    for start in range(first + share * BLOCK_T, end, num_shares * BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        is_token = tokens < end
        depth = tl.load(depths + tokens, mask=is_token, other=0).to(tl.int32)
        node, total = tokens.to(tl.int64), tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        for back in tl.static_range(SIZE):
            is_new, is_old = is_token & (depth >= back), is_token & (depth < back)
            new = inputs + node[:, None] * stride_token + channels[None, :].to(tl.int64) * stride_channel
            old = row_tails + (SIZE - 1 + depth - back)[:, None] * num_channels + channels[None, :]
            states = tl.load(new, mask=is_new[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
            states += tl.load(old, mask=is_old[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
            taps = tl.load(weight + channels * SIZE + SIZE - 1 - back, mask=is_channel, other=0.0).to(tl.float32)
            total += states * taps[None, :]
            node = tl.load(parents + node, mask=is_token, other=0)  # a root is its own
        result = total.to(mixed.dtype.element_ty)
        if IS_SILU:
            result = activate(result.to(tl.float32), 0).to(mixed.dtype.element_ty)
        cells = tokens[:, None].to(tl.int64) * num_channels + channels[None, :]
        tl.store(mixed + cells, result, mask=is_token[:, None] & is_channel[None, :])
    number, count = row * num_shares + share, tl.num_programs(0) * num_shares
    for start in range(tl.load(offsets + tl.num_programs(0)) + number * BLOCK_T, num_tokens, count * BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        cells = tokens[:, None].to(tl.int64) * num_channels + channels[None, :]
        nothing = tl.zeros([BLOCK_T, BLOCK_C], mixed.dtype.element_ty)
        tl.store(mixed + cells, nothing, mask=(tokens < num_tokens)[:, None] & is_channel[None, :])


@torch.library.custom_op("stand::convolve", mutates_args=())
def convolve(
    inputs: torch.Tensor,
    tails: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parents: torch.Tensor,
    depths: torch.Tensor,
    offsets: torch.Tensor,
    cache_rows: torch.Tensor,
    is_silu: bool,
) -> torch.Tensor:
    """[M, C] in the weight's type, zeros at padding: bias[c] + the sum over n of weight[c, N - n] * the input n tokens
    before, by paths. is_silu: SiLU of that.

    inputs [M, C] of packed tokens; tails [R, N, C], contiguous: by cache row those of the N newest committed tokens,
    the oldest first; weight [C, N + 1] contiguous; the rest: see `StepPacket`.
    """
    (num_tokens, num_channels), size = inputs.shape, weight.shape[1]
    mixed = torch.empty(num_tokens, num_channels, dtype=weight.dtype, device=weight.device)
    num_rows = len(cache_rows)
    grid = num_rows, triton.cdiv(num_channels, BLOCK_CHANNELS), triton.cdiv(num_tokens, num_rows * BLOCK_TOKENS)
    with launch_device(_convolve, inputs):
        _convolve[grid](
            inputs, tails, weight, weight if bias is None else bias.contiguous(), parents, depths, offsets, cache_rows,
            mixed, num_tokens, num_channels, *inputs.stride(),
            SIZE=size, HAS_BIAS=bias is not None, IS_SILU=is_silu, BLOCK_T=BLOCK_TOKENS, BLOCK_C=BLOCK_CHANNELS,
        )  # fmt: skip
    return mixed


@convolve.register_fake
def _(inputs, tails, weight, bias, parents, depths, offsets, cache_rows, is_silu):
    return weight.new_empty(inputs.shape)


@triton.jit
def _keep_tails(
    inputs, tails, offsets, cache_rows, path, num_channels, stride_token, stride_channel, stride_path, max_depth,
    SIZE: tl.constexpr, BLOCK_PATH: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Program (row, block of channels). Tails are written from the oldest on: what a later one is made of lies behind
    it, and a channel belongs to one thread."""
    row, channels = tl.program_id(0), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    if first < end:
        places = tl.arange(0, BLOCK_PATH)
        nodes = tl.load(path + row * stride_path + places, mask=places < max_depth, other=-1)
        depth = tl.sum((nodes >= 0).to(tl.int32), axis=0)  # of the last token that stays
        row_tails = tails + tl.load(cache_rows + row).to(tl.int64) * SIZE * num_channels
        is_channel = channels < num_channels
        for place in tl.static_range(SIZE):
            back = depth - SIZE + 1 + place  # its depth; negative: a committed token's
            node = tl.sum(tl.where(places == back - 1, nodes, 0), axis=0)
            new = inputs + (first + node) * stride_token + channels.to(tl.int64) * stride_channel
            old = row_tails + (SIZE + back) * num_channels + channels
            states = tl.load(new, mask=is_channel & (back >= 0), other=0.0)
            states += tl.load(old, mask=is_channel & (back < 0), other=0.0)
            tl.store(row_tails + place * num_channels + channels, states, mask=is_channel)


@torch.library.custom_op("stand::keep_tails", mutates_args=("tails",))
def keep_tails(
    inputs: torch.Tensor, tails: torch.Tensor, offsets: torch.Tensor, cache_rows: torch.Tensor, path: torch.Tensor
) -> None:
    """Make `tails` [R, N, C] those behind the kept paths. inputs [M, C]: as `convolve` got them, of the tails' type;
    path [B, L]: row-local nodes kept at depths 1, 2, ..., then -1; the root stays. Rows without tokens stay as they
    are."""
    num_rows, max_depth = path.shape
    grid = (num_rows, triton.cdiv(tails.shape[2], BLOCK_CHANNELS))
    with launch_device(_keep_tails, tails):
        _keep_tails[grid](
            inputs, tails, offsets, cache_rows, path, tails.shape[2], *inputs.stride(), path.stride(0), max_depth,
            SIZE=tails.shape[1], BLOCK_PATH=triton.next_power_of_2(max_depth), BLOCK_C=BLOCK_CHANNELS, num_warps=2,
        )  # fmt: skip


@keep_tails.register_fake
def _(inputs, tails, offsets, cache_rows, path):
    return None
