"""The experts of a mixture on a CPU: tokens sorted by expert, two products that read every expert once."""

from __future__ import annotations

import torch
from torch.nn.functional import relu

from stand.forward.few_tokens.dot_products import multiply_groups
from stand.forward.few_tokens.product import DTYPE_NAMES, NUMBERS, WIDEST, described, is_plain
from stand.fusion.cpu.kernels import gated_product
from stand.fusion.formulas import ACTIVATIONS, RELU_SQUARED
from stand.simd.threads import parallel_region


def mixed_experts(
    states: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    activation: int,
    is_transposed: bool,
    is_interleaved: bool,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """Every token through its experts, whose results are added up by its shares -> [M, H].

    states [M, H]; experts [M, k] int64 and shares [M, k], float32 or of the states' dtype; up [E, 2 I, H], the gates
    first, with biases [E, 2 I], or [E, I, H] and [E, I] under RELU_SQUARED; down [E, H, I] and biases [E, H]. All are
    contiguous. A token's result has the same bits whatever other tokens there are.

    Raises ValueError for other tensors, transposed or interleaved weights and other activations (`alpha` and `limit`
    are of CLAMPED, which is none of these), IndexError for an expert that is not there.
    """
    if is_transposed or is_interleaved or activation not in (*ACTIVATIONS, RELU_SQUARED):
        raise ValueError(
            f"on a CPU, weights must be rows of outputs, gates before others, and the activation one of {ACTIVATIONS} "
            f"or {RELU_SQUARED}, got transposed {is_transposed}, interleaved {is_interleaved}, {activation}; use the "
            "module's own forward"
        )
    is_gated = activation != RELU_SQUARED
    _check(states, experts, shares, up, up_bias, down, down_bias, is_gated)
    num_experts, size = len(up), down.shape[2]
    ids, order = experts.flatten().sort(stable=True)
    if len(ids) and not (ids[0] >= 0 and ids[-1] < num_experts):
        raise IndexError(
            f"experts must be numbers from 0 below {num_experts}, got {int(ids[0])} to {int(ids[-1])}; use the "
            "module's own forward"
        )
    ends = torch.searchsorted(ids, torch.arange(num_experts, device=ids.device), right=True)
    inner = _products(states.index_select(0, order // experts.shape[1]), ends, up, up_bias)
    if is_gated:
        active = gated_product(inner[:, :size], inner[:, size:], activation)
    else:
        active = relu(inner).square_()
    parts = states.new_empty(len(ids), states.shape[1])
    parts.index_copy_(0, order, _products(active, ends, down, down_bias))
    weighted = parts.view(*experts.shape, states.shape[1]) * shares.unsqueeze(-1)
    return weighted.sum(dim=1).to(states.dtype)


def _products(
    tokens: torch.Tensor, ends: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """tokens [P, K] of one expert after the other, which end at `ends` [E], with its weights [E, N, K] and bias [E, N]
    -> [P, N]."""
    num_experts, num_rows, depth = weights.shape
    results = tokens.new_empty(len(tokens), num_rows)
    bias_address = 0 if bias is None else bias.data_ptr()
    addresses = tokens.data_ptr(), ends.data_ptr(), weights.data_ptr(), bias_address, results.data_ptr()
    ways = NUMBERS[tokens.dtype], WIDEST, torch.get_num_threads(), parallel_region()
    multiply_groups(addresses, num_experts, num_rows, depth, *ways)
    return results


def _check(
    states: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    is_gated: bool,
) -> None:
    """Shapes, dtypes and places in memory, but not the numbers of the experts."""
    numbers = [tensor for tensor in (states, up, up_bias, down, down_bias) if tensor is not None]
    are_plain = all(is_plain(tensor) and tensor.dtype is states.dtype for tensor in numbers)
    are_routes = experts.dtype is torch.int64 and experts.shape == shares.shape and experts.dim() == 2
    if are_plain and are_routes and up.dim() == down.dim() == 3 and min(down.shape) > 0:
        num_experts, depth, size = down.shape
        outputs = 2 * size if is_gated else size
        is_pair = up.shape == (num_experts, outputs, depth) and states.shape == (len(experts), depth)
        has_up_bias = up_bias is None or up_bias.shape == (num_experts, outputs)
        has_down_bias = down_bias is None or down_bias.shape == (num_experts, depth)
        if is_pair and has_up_bias and has_down_bias:
            return
    got = ", ".join(
        described(tensor) + ("" if tensor.is_contiguous() else " not contiguous")
        for tensor in (*numbers, experts, shares)
    )
    raise ValueError(
        "states [M, H], experts [M, k] int64, shares [M, k], weights [E, 2 I or I, H] and [E, H, I] with biases must "
        f"be contiguous, all numbers of {DTYPE_NAMES}, on a CPU, without gradients, got {got}; use the module's own "
        "forward"
    )
