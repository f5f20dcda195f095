"""Norms, gates and rotary positions with the cache write on a CPU: float32, each in one pass over its numbers.

They take and return what the Triton kernels of the same names do (`stand.gpu.kernels`). A token's result has the same
bits whatever other tokens there are, with any number of threads and any instruction set. Threads are torch's own, where
torch has GNU's OpenMP, from some ten thousand numbers on. Gradients are not kept.
"""

from __future__ import annotations

import torch

from stand.forward.few_token_product import WIDEST, parallel_region
from stand.fusion.formulas import ACTIVATIONS, NO_NORM, ONE_PLUS, RULES
from stand.fusion.row_kernels import gate as gate_rows
from stand.fusion.row_kernels import norm as norm_rows
from stand.fusion.row_kernels import turn as turn_rows

LARGEST_HEAD = 1024  # numbers; as in rows/jobs.h


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float, rule: int) -> torch.Tensor:
    """Normalise the last dimension of `states` [..., N] and scale it by `weight` [N] under a rule of `RULES`.

    Result [..., N], contiguous.
    """
    size = _checked_size(states, weight, rule)
    rows, stride = _rows(states)
    output = _new(states)
    norm_rows(
        rows.data_ptr(), 0, weight.data_ptr(), 0, output.data_ptr(), stride, 0, output.numel() // size, size, eps,
        rule == ONE_PLUS, *_ways(),
    )  # fmt: skip
    return output


def add_rms_norm(
    states: torch.Tensor, change: torch.Tensor, weight: torch.Tensor, eps: float, rule: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(states + change, and what `rms_norm` makes of it), both [..., N], contiguous, for two tensors of one shape."""
    size = _checked_size(states, weight, rule)
    if change.shape != states.shape or not _is_plain(change):
        raise ValueError(
            f"what is added must be as the states, {tuple(states.shape)} in float32, got {tuple(change.shape)} in "
            f"{change.dtype}; use the module's own forward"
        )
    (rows, stride), (changes, change_stride) = _rows(states), _rows(change)
    total, output = _new(states), _new(states)
    norm_rows(
        rows.data_ptr(), changes.data_ptr(), weight.data_ptr(), total.data_ptr(), output.data_ptr(), stride,
        change_stride, output.numel() // size, size, eps, rule == ONE_PLUS, *_ways(),
    )  # fmt: skip
    return total, output


def gated_product(gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    """activation(gate) * up for gate, up [..., I], which may be column slices of one merged output.

    Result [..., I], contiguous. `activation` is one of `ACTIVATIONS`.
    """
    if not (_is_plain(gate) and _is_plain(up)) or up.shape != gate.shape or gate.dim() == 0:
        raise ValueError(
            f"gate and up must be float32 on a CPU of one shape, got {tuple(gate.shape)} {gate.dtype} and "
            f"{tuple(up.shape)} {up.dtype}; use the module's own forward"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation}")
    output = _new(gate)
    if output.numel() == 0:
        return output
    size = gate.shape[-1]
    (gates, gate_stride), (ups, up_stride) = _rows(gate), _rows(up)
    gate_rows(
        gates.data_ptr(), ups.data_ptr(), output.data_ptr(), gate_stride, up_stride, output.numel() // size, size,
        activation, *_ways(),
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
) -> torch.Tensor:
    """Rotate query and key, write key and value to the cache, return the query [M, H, D], contiguous.

    query [M, H, D], key, value [M, Hkv, D]: heads adjacent, tokens at any distance. cos, sin [M, rotary] or
    [M, rotary / 2] (one half, used for both). keys, values [R, Hkv, S, D]: the cache of one layer, any strides but
    adjacent D. slots [M] int64: row * S + slot of each token; a negative one is not written.
    rotary: leading components that turn; 0 leaves cos and sin unread.
    rule: how query_weight and key_weight [D] norm the heads first (`RULES`), or NO_NORM.

    Raises ValueError for other tensors, IndexError for a slot beyond the cache, before anything is written.
    """
    _check_heads(query, key, value, keys, values, slots)
    _check_rotation(query, cos, sin, rotary)
    _check_norm(query, query_weight, key_weight, rule)
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
        addresses, strides, num_tokens, heads, key_heads, size, rotary // 2, room, num_rows * room, eps,
        rule == ONE_PLUS, *_ways(),
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
    return tensor.is_cpu and tensor.dtype is torch.float32


def _rows(states: torch.Tensor) -> tuple[torch.Tensor, int]:
    """[..., N] with adjacent columns, and the distance of its rows."""
    if states.is_contiguous():
        return states, states.shape[-1]
    rows = states.reshape(-1, states.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def _checked_size(states: torch.Tensor, weight: torch.Tensor, rule: int) -> int:
    if not (_is_plain(states) and _is_plain(weight)):
        raise ValueError(
            f"states and weight must be float32 on a CPU, got {states.dtype} on {states.device} and {weight.dtype} on "
            f"{weight.device}; load the model with dtype=torch.float32"
        )
    size = states.shape[-1]
    if weight.shape != (size,) or size == 0 or not weight.is_contiguous():
        raise ValueError(
            f"weight must have the states' last size and be contiguous, got {tuple(weight.shape)} for {size}; use the "
            "module's own forward"
        )
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule}")
    return size


def _check_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    if not all(map(_is_plain, (query, key, value, keys, values))):
        raise ValueError(
            "query, key, value and the cache must be float32 on a CPU, got "
            f"{query.dtype}, {key.dtype}, {value.dtype}, {keys.dtype} and {values.dtype}; make the cache in the "
            "model's dtype"
        )
    tokens, _, size = query.shape
    shape = key.shape
    if value.shape != shape or shape[0] != tokens or shape[2] != size or slots.shape != (tokens,):
        raise ValueError(
            "query [M, H, D], key and value [M, Hkv, D] and slots [M] must agree, got "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)} and {tuple(slots.shape)}"
        )
    if size > LARGEST_HEAD or any(not _has_adjacent_heads(part) for part in (query, key, value)):
        raise ValueError(
            f"a token's heads, of at most {LARGEST_HEAD} numbers, must lie next to each other, got another layout; use "
            "contiguous()"
        )
    cache = keys.shape
    if (
        (cache[1], cache[3]) != shape[1:]
        or keys.stride(3) != 1
        or slots.dtype is not torch.int64
        or not slots.is_contiguous()
    ):
        raise ValueError(
            f"the cache must be [R, {shape[1]}, S, {size}] with adjacent components and slots contiguous int64, got "
            f"{tuple(cache)} and {slots.dtype}"
        )
    if values.shape != cache or values.stride() != keys.stride():
        raise ValueError(
            "keys and values must have one layout, got "
            f"{tuple(cache)} {keys.stride()} and {tuple(values.shape)} {values.stride()}"
        )


def _has_adjacent_heads(part: torch.Tensor) -> bool:
    _, between, inside = part.stride()
    return inside == 1 and (between == part.shape[2] or part.shape[1] == 1)


def _check_rotation(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int) -> None:
    if rotary == 0:
        return
    tokens, _, size = query.shape
    if rotary % 2 or not 0 < rotary <= size:
        raise ValueError(f"rotary must be even and at most the head size {size}, got {rotary}")
    if cos.shape != sin.shape or cos.shape[0] != tokens or cos.shape[1] not in (rotary, rotary // 2):
        raise ValueError(
            f"cos and sin must be [{tokens}, {rotary}] or half as wide, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if not (_is_plain(cos) and _is_plain(sin)) or cos.stride(1) != 1 or sin.stride(1) != 1:
        raise ValueError(
            f"cos and sin must be float32 with adjacent components, got {cos.dtype} and {sin.dtype}; use contiguous()"
        )


def _check_norm(
    query: torch.Tensor, query_weight: torch.Tensor | None, key_weight: torch.Tensor | None, rule: int
) -> None:
    weights = (query_weight, key_weight)
    if rule == NO_NORM:
        if query_weight is not None or key_weight is not None:
            raise ValueError("weights need a rule, got weights without a norm; pass None")
        return
    if rule not in RULES:
        raise ValueError(f"rule must be {NO_NORM} or one of {RULES}, got {rule}")
    if any(
        weight is None or weight.shape != query.shape[2:] or not _is_plain(weight) or not weight.is_contiguous()
        for weight in weights
    ):
        raise ValueError(f"a norm needs two contiguous weights [{query.shape[2]}] in float32, got others")
