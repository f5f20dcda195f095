"""RMSNorm in one kernel, alone or behind an addition, with the roundings of the transformers classes it stands for.

Zhang and Sennrich, Root Mean Square Layer Normalization, NeurIPS 2019, equation 4. The classes differ in where they
round to the model's dtype and in what they scale by; `RULES` names the three variants.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.fusion.formulas import RULES
from stand.gpu.kernels.launch import FLOATS, launch_device

MAX_SIZE = 16384  # a row lives in the registers of one program


@triton.jit
def scale_normal(normal, weight, RULE: tl.constexpr, DTYPE: tl.constexpr):
    """float32 normal and weight to the norm's output, rounded to DTYPE as the rule does."""
    if RULE == 2:
        return (normal * (1.0 + weight)).to(DTYPE)
    elif RULE == 1:
        return (normal * weight).to(DTYPE)
    else:
        return (normal.to(DTYPE).to(tl.float32) * weight).to(DTYPE)


@triton.jit
def _normed(values, weight, columns, inside, eps, SIZE: tl.constexpr, RULE: tl.constexpr, DTYPE: tl.constexpr):
    """A row of float32 values, normed and rounded."""
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normal = values * tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    return scale_normal(normal, scale, RULE, DTYPE)


@triton.jit
def _rms_norm(states, weight, output, row_stride, eps, SIZE: tl.constexpr, RULE: tl.constexpr, BLOCK: tl.constexpr):
    """One row per program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    values = tl.load(states + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    normed = _normed(values, weight, columns, inside, eps, SIZE, RULE, output.dtype.element_ty)
    tl.store(output + row * SIZE + columns, normed, mask=inside)


@triton.jit
def _add_rms_norm(
    states, change, weight, total, output, states_stride, change_stride, eps,
    SIZE: tl.constexpr, RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row per program; the sum is rounded before it is normed, as two kernels would."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    added = tl.load(states + row * states_stride + columns, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(change + row * change_stride + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + row * SIZE + columns, rounded, mask=inside)
    normed = _normed(rounded.to(tl.float32), weight, columns, inside, eps, SIZE, RULE, output.dtype.element_ty)
    tl.store(output + row * SIZE + columns, normed, mask=inside)


@torch.library.custom_op("stand::rms_norm", mutates_args=())
def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float, rule: int) -> torch.Tensor:
    """Normalise the last dimension of `states` [..., N] and scale it by `weight` [N] under a rule of `RULES`.

    Result [..., N], contiguous, of the dtype of `states`. The sum of squares is taken in float32.
    """
    rows = rows_of(states, _checked_size(states, weight, rule))
    size = rows.shape[1]
    output = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    block = triton.next_power_of_2(size)
    with launch_device(_rms_norm, states):
        _rms_norm[(rows.shape[0],)](
            rows, weight, output, rows.stride(0), eps, SIZE=size, RULE=rule, BLOCK=block, num_warps=_num_warps(block)
        )
    return output


@rms_norm.register_fake
def _(states: torch.Tensor, weight: torch.Tensor, eps: float, rule: int) -> torch.Tensor:
    _checked_size(states, weight, rule)
    return torch.empty(states.shape, dtype=states.dtype, device=states.device)


@torch.library.custom_op("stand::add_rms_norm", mutates_args=())
def add_rms_norm(
    states: torch.Tensor, change: torch.Tensor, weight: torch.Tensor, eps: float, rule: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(states + change, and what `rms_norm` makes of it), both [..., N], contiguous, for two tensors of one shape."""
    size = _checked_size(states, weight, rule)
    if change.shape != states.shape or change.dtype != states.dtype:
        raise ValueError(
            f"what is added must be as the states, {tuple(states.shape)} in {states.dtype}, got {tuple(change.shape)} "
            f"in {change.dtype}; use the module's own forward"
        )
    rows, changes = rows_of(states, size), rows_of(change, size)
    total, output = (torch.empty(states.shape, dtype=states.dtype, device=states.device) for _ in range(2))
    block = triton.next_power_of_2(size)
    with launch_device(_add_rms_norm, states):
        _add_rms_norm[(rows.shape[0],)](
            rows, changes, weight, total, output, rows.stride(0), changes.stride(0), eps,
            SIZE=size, RULE=rule, BLOCK=block, num_warps=_num_warps(block),
        )  # fmt: skip
    return total, output


@add_rms_norm.register_fake
def _(states, change, weight, eps, rule):
    _checked_size(states, weight, rule)
    total, output = (torch.empty(states.shape, dtype=states.dtype, device=states.device) for _ in range(2))
    return total, output


def rows_of(states: torch.Tensor, size: int) -> torch.Tensor:
    """[..., N] as [rows, N] with adjacent columns; a view where the layout allows one."""
    rows = states.reshape(-1, size)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _num_warps(block: int) -> int:
    """Eight to sixteen values per thread."""
    return max(1, min(16, block // 512))


def _checked_size(states: torch.Tensor, weight: torch.Tensor, rule: int) -> int:
    size = states.shape[-1]
    if states.dtype not in FLOATS or weight.dtype != states.dtype:
        raise ValueError(
            "states and weight must share one dtype of float32, bfloat16 and float16, got "
            f"{states.dtype} and {weight.dtype}; load the model with one dtype="
        )
    if weight.shape != (size,) or size > MAX_SIZE:
        raise ValueError(
            f"weight must have the states' last size, at most {MAX_SIZE}, got {tuple(weight.shape)} for {size}; "
            "use the module's own forward"
        )
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule}")
    return size
