"""The gate of a feed-forward block: activation(gate) * up in one kernel.

Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202, equation 5: SwiGLU and GEGLU, the latter also with the
tanh approximation of GELU that Gemma uses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.fusion.formulas import ACTIVATIONS
from stand.gpu.kernels.launch import FLOATS, launch_device
from stand.gpu.kernels.norm import rows_of

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) without overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:
        return x * sigmoid(x)
    elif ACTIVATION == 1:
        # 0.5 x (1 + tanh(y)) = x sigmoid(2 y)
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def _gated_product(
    gate, up, output, gate_stride, up_stride, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK columns of one row per program; rounded after the activation, as two separate kernels would."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gates = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    dtype = output.dtype.element_ty
    active = activate(gates, ACTIVATION).to(dtype).to(tl.float32)
    tl.store(output + row * size + columns, (active * ups).to(dtype), mask=inside)


@torch.library.custom_op("stand::gated_product", mutates_args=())
def gated_product(gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    """activation(gate) * up for gate, up [..., I], which may be column slices of one merged output.

    Result [..., I], contiguous. `activation` is one of `ACTIVATIONS`.
    """
    _check(gate, up, activation)
    size = gate.shape[-1]
    gates, ups = (rows_of(one, one.shape[-1]) for one in (gate, up))
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grid = (gates.shape[0], triton.cdiv(size, BLOCK))
    with launch_device(_gated_product, gate):
        _gated_product[grid](
            gates,
            ups,
            output,
            gates.stride(0),
            ups.stride(0),
            size,
            ACTIVATION=activation,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return output


@gated_product.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    _check(gate, up, activation)
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def _check(gate: torch.Tensor, up: torch.Tensor, activation: int) -> None:
    if gate.dtype not in FLOATS or up.dtype != gate.dtype or up.shape != gate.shape:
        raise ValueError(
            "gate and up must share shape and a dtype of float32, bfloat16 and float16, got "
            f"{tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}; use the module's own forward"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation}")
