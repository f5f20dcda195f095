"""The norm with a gate that ends a layer with a recurrent state, in one kernel: RMSNorm (Zhang and Sennrich, 2019,
equation 4) before or behind the gate, with the roundings of the transformers classes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.fusion.formulas import GATE_FIRST, GATE_ORDERS
from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.norm import MAX_SIZE, rows_of
from stand.gpu.kernels.swiglu import activate


@triton.jit
def _gated_rms_norm(
    states, gate, weight, output, states_stride, gate_stride, size, eps,
    GROUP: tl.constexpr, IS_SHARED: tl.constexpr, IS_GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, group)."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places, columns = tl.arange(0, BLOCK), group * GROUP + tl.arange(0, BLOCK)
    inside = places < GROUP
    values = tl.load(states + row * states_stride + columns, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + (places if IS_SHARED else columns), mask=inside, other=0.0).to(tl.float32)
    active = activate(gates, 0)  # SiLU
    values = values * active if IS_GATE_FIRST else values
    normal = values * tl.rsqrt(tl.sum(values * values, axis=0) / GROUP + eps)
    scaled = (scale * normal.to(states.dtype.element_ty).to(tl.float32)).to(output.dtype.element_ty)
    if not IS_GATE_FIRST:
        scaled = (scaled.to(tl.float32) * active).to(output.dtype.element_ty)
    tl.store(output + row * size + columns, scaled, mask=inside)


@torch.library.custom_op("stand::gated_rms_norm", mutates_args=())
def gated_rms_norm(
    states: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group: int, order: int
) -> torch.Tensor:
    """weight * normal * silu(gate), or the norm of states * silu(gate), for states and gate [..., N].

    weight [N], or [group] for all groups; group: neighbours that are normalised together; order: one of `GATE_ORDERS`.
    Result [..., N], contiguous, of the type of weight * states. All sums are in float32.
    """
    size = _checked_size(states, gate, weight, group, order)
    rows, gates = rows_of(states, size), rows_of(gate, size)
    output = _empty_like(states, weight)
    block = triton.next_power_of_2(group)
    with launch_device(_gated_rms_norm, states):
        _gated_rms_norm[(len(rows), size // group)](
            rows, gates, weight.contiguous(), output, rows.stride(0), gates.stride(0), size, eps,
            GROUP=group, IS_SHARED=len(weight) < size, IS_GATE_FIRST=order == GATE_FIRST, BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
        )  # fmt: skip
    return output


@gated_rms_norm.register_fake
def _(states, gate, weight, eps, group, order):
    _checked_size(states, gate, weight, group, order)
    return _empty_like(states, weight)


def _empty_like(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    dtype = weight.dtype if states.dtype == weight.dtype else torch.float32
    return torch.empty(states.shape, dtype=dtype, device=states.device)


def _checked_size(states: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, group: int, order: int) -> int:
    size = states.shape[-1]
    if gate.shape != states.shape or weight.shape not in {(size,), (group,)} or size % group or group > MAX_SIZE:
        raise ValueError(
            f"gate and weight must be as the states, in groups of at most {MAX_SIZE} that fill their last size, got "
            f"{tuple(gate.shape)}, {tuple(weight.shape)} and {group} for {tuple(states.shape)}; use the module's own "
            "forward"
        )
    if order not in GATE_ORDERS:
        raise ValueError(f"order must be one of {GATE_ORDERS}, got {order}; they are in stand.fusion.formulas")
    return size
