"""Norms, gates and rotary positions with the cache write on a CPU, each in one pass over its numbers: float32, or
bfloat16 on a processor with AVX2.

They take and return what the Triton kernels of the same names do (`stand.gpu.kernels`). A token's result has the same
bits whatever other tokens there are, with any number of threads and any instruction set. Threads are torch's own, where
torch has GNU's OpenMP, from some ten thousand numbers on. Gradients are not kept.
"""

from __future__ import annotations

import torch

from stand.forward.few_tokens.product import DTYPE_NAMES, DTYPES, ORDINARY, WIDEST, described
from stand.fusion.formulas import ACTIVATIONS, NO_NORM, RULES
from stand.fusion.rotation_checks import check_heads, check_norm, check_rotation
from stand.simd.threads import parallel_region
from stand.step_compiled import gate_rows, norm_rows, turn_rows

LARGEST_HEAD = 1024  # numbers; as in rows/jobs.h


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float, rule: int) -> torch.Tensor:
    """Normalise the last dimension of `states` [..., N] and scale it by `weight` [N] under a rule of `RULES`.

    Result [..., N], contiguous.
    """
    size = _checked_size(states, weight, rule)
    rows, stride = _rows(states)
    output = _new(states)
    norm_rows(
        rows.data_ptr(), 0, weight.data_ptr(), 0, output.data_ptr(), stride, 0, output.numel() // size, size, eps, rule,
        _is_narrow(states), *_ways(),
    )  # fmt: skip
    return output


def add_rms_norm(
    states: torch.Tensor, change: torch.Tensor, weight: torch.Tensor, eps: float, rule: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(states + change, and what `rms_norm` makes of it), both [..., N], contiguous, for two tensors of one shape."""
    size = _checked_size(states, weight, rule)
    if change.shape != states.shape or not (_is_readable(change) and change.dtype is states.dtype):
        raise ValueError(
            f"what is added must be as the states, {described(states)}, got {described(change)}; use the module's own "
            "forward"
        )
    (rows, stride), (changes, change_stride) = _rows(states), _rows(change)
    total, output = _new(states), _new(states)
    norm_rows(
        rows.data_ptr(), changes.data_ptr(), weight.data_ptr(), total.data_ptr(), output.data_ptr(), stride,
        change_stride, output.numel() // size, size, eps, rule, _is_narrow(states), *_ways(),
    )  # fmt: skip
    return total, output


def gated_product(gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    """activation(gate) * up for gate, up [..., I], which may be column slices of one merged output.

    Result [..., I], contiguous. `activation` is one of `ACTIVATIONS`.
    """
    is_one_kind = _is_plain(gate) and _is_readable(up) and up.dtype is gate.dtype
    if not is_one_kind or up.shape != gate.shape or gate.dim() == 0:
        raise ValueError(
            f"gate and up must be {DTYPE_NAMES} on a CPU and of one shape, got {described(gate)} and {described(up)}; "
            "use the module's own forward"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation}; use the module's own forward")
    output = _new(gate)
    if output.numel() == 0:
        return output
    size = gate.shape[-1]
    (gates, gate_stride), (ups, up_stride) = _rows(gate), _rows(up)
    gate_rows(
        gates.data_ptr(), ups.data_ptr(), output.data_ptr(), gate_stride, up_stride, output.numel() // size, size,
        activation, _is_narrow(gate), *_ways(),
    )  # fmt: skip
    return output


def rope_and_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    rotary: int,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    eps: float,
    rule: int,
    value_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate query and key, write key and value to the cache, return the query [M, H, D], contiguous.

    query [M, H, D], key, value [M, Hkv, D]: heads adjacent, tokens at any distance. cos, sin [M, rotary] or
    [M, rotary / 2] (one half, used for both). keys, values [R, Hkv, S, D]: the cache of one layer, any strides but
    adjacent D. slots [M] int64: row * S + slot of each token; a negative one is not written.
    rotary: leading components that turn; 0 leaves cos and sin unread.
    rule: how query_weight and key_weight [D] norm the heads first (`RULES`), or NO_NORM; and value_weight [D] those of
    values, None where they stay as they are.

    Raises ValueError for other tensors, IndexError for a slot beyond the cache, before anything is written.
    """
    _check_plain(query, key, value, cos, sin, keys, values, slots, query_weight, key_weight)
    check_heads(query, key, value, keys, values, slots)
    check_rotation(query, cos, sin, rotary)
    check_norm(query, query_weight, key_weight, rule, value_weight)
    if value_weight is not None:
        value = rms_norm(value, value_weight, eps, rule)
    num_tokens, heads, size = query.shape
    output = _new(query)
    weights = [0, 0] if rule == NO_NORM else [query_weight.data_ptr(), key_weight.data_ptr()]
    addresses = (
        query.data_ptr(), key.data_ptr(), value.data_ptr(), cos.data_ptr(), sin.data_ptr(), *weights, slots.data_ptr(),
        output.data_ptr(), keys.data_ptr(), values.data_ptr(),
    )  # fmt: skip
    second = rotary // 2 if cos.shape[1] == rotary else 0
    strides = (
        query.stride(0), key.stride(0), value.stride(0), cos.stride(0), sin.stride(0), second, *keys.stride()[:3]
    )  # fmt: skip
    num_rows, key_heads, room, _ = keys.shape
    is_inside = turn_rows(
        addresses, strides, num_tokens, heads, key_heads, size, rotary // 2, room, num_rows * room, eps, rule,
        _is_narrow(query), *_ways(),
    )  # fmt: skip
    if not is_inside:
        raise IndexError(
            f"slots must lie in the cache of {num_rows} rows with {room} slots, got {int(slots.max())}; make room first"
        )
    return output


def _ways() -> tuple[int, int, int]:
    """Instruction set, threads, and who runs them."""
    return WIDEST, torch.get_num_threads(), parallel_region()


def _new(like: torch.Tensor) -> torch.Tensor:
    """Room for a contiguous tensor of the same shape; half of the time that `torch.empty` takes."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _is_plain(tensor: torch.Tensor) -> bool:
    return _is_readable(tensor) and tensor.dtype in DTYPES


def _is_readable(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and type(tensor) in ORDINARY


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.bfloat16


def _rows(states: torch.Tensor) -> tuple[torch.Tensor, int]:
    """[..., N] with adjacent columns, and the distance of its rows."""
    if states.is_contiguous():
        return states, states.shape[-1]
    rows = states.reshape(-1, states.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def _checked_size(states: torch.Tensor, weight: torch.Tensor, rule: int) -> int:
    if not (_is_plain(states) and _is_readable(weight) and weight.dtype is states.dtype):
        raise ValueError(
            f"states and weight must be {DTYPE_NAMES} on a CPU, got {described(states)} and {described(weight)}; "
            "use the module's own forward"
        )
    size = states.shape[-1]
    if weight.shape != (size,) or size == 0 or not weight.is_contiguous():
        raise ValueError(
            f"weight must have the states' last size and be contiguous, got {tuple(weight.shape)} for {size}; use the "
            "module's own forward"
        )
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule}; use the module's own forward")
    return size


def _check_plain(query: torch.Tensor, *others: torch.Tensor | None) -> None:
    """All on a CPU, the query of a known dtype and small enough; that dtypes agree is checked elsewhere."""
    if not (_is_plain(query) and all(other is None or _is_readable(other) for other in others)):
        got = ", ".join(described(part) for part in (query, *others) if part is not None)
        raise ValueError(
            f"a query of {DTYPE_NAMES} and all else must be on a CPU, got {got}; use the module's own forward"
        )
    if query.shape[-1] > LARGEST_HEAD:
        raise ValueError(f"heads must have at most {LARGEST_HEAD} numbers, got {query.shape[-1]}; pass fuse=False")
