"""What `rope_and_store` asks of its tensors, by whichever kernel: dtypes that agree, shapes, and layouts."""

from __future__ import annotations

import torch

from stand.fusion.formulas import HALVES, NO_NORM, PAIRED_COLUMNS, RULES


def check_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Raises ValueError where the tokens' heads and the cache do not fit together."""
    dtype = query.dtype
    if key.dtype != dtype or value.dtype != dtype or keys.dtype != dtype or values.dtype != dtype:
        raise ValueError(
            "query, key, value and the cache must share a dtype, got "
            f"{dtype}, {key.dtype}, {value.dtype}, {keys.dtype} and {values.dtype}; make the cache in the model's dtype"
        )
    tokens, _, size = query.shape
    shape = key.shape
    if value.shape != shape or shape[0] != tokens or shape[2] != size or slots.shape != (tokens,):
        raise ValueError(
            "query [M, H, D], key and value [M, Hkv, D] and slots [M] must agree, got "
            f"{tuple(query.shape)}, {tuple(shape)}, {tuple(value.shape)} and {tuple(slots.shape)}; "
            "give every token a key, a value and a slot"
        )
    if not (_has_adjacent_heads(query) and _has_adjacent_heads(key) and _has_adjacent_heads(value)):
        raise ValueError("a token's heads must lie next to each other, got another layout; use contiguous()")
    cache = keys.shape
    fits = cache[1] == shape[1] and cache[3] == size and keys.stride(3) == 1
    if not fits or slots.dtype is not torch.int64 or not slots.is_contiguous():
        raise ValueError(
            f"the cache must be [R, {shape[1]}, S, {size}] with adjacent components and contiguous slots int64, got "
            f"{tuple(cache)} with strides {keys.stride()} and {slots.dtype}; make the cache for these heads"
        )
    if values.shape != cache or values.stride() != keys.stride():
        raise ValueError(
            "keys and values must have one layout, got "
            f"{tuple(cache)} {keys.stride()} and {tuple(values.shape)} {values.stride()}; make both in one way"
        )


def check_rotation(
    query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int, pairing: int = HALVES
) -> None:
    """Raises ValueError where the factors do not fit the query; with `rotary` 0 they are not looked at."""
    if rotary == 0:
        return
    tokens, _, size = query.shape
    if rotary % 2 or not 0 < rotary <= size:
        raise ValueError(
            f"rotary must be even and at most the head size {size}, got {rotary}; use 0 for heads that do not turn"
        )
    widths = (rotary,) if pairing == PAIRED_COLUMNS else (rotary, rotary // 2)
    if cos.shape != sin.shape or cos.shape[0] != tokens or cos.shape[1] not in widths:
        raise ValueError(
            f"cos and sin must be [{tokens}, {' or '.join(map(str, widths))}], got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}; give every token its factors"
        )
    if cos.dtype != query.dtype or sin.dtype != query.dtype or cos.stride(1) != 1 or sin.stride(1) != 1:
        raise ValueError(
            f"cos and sin must be of the query's dtype {query.dtype} with adjacent components, got {cos.dtype} and "
            f"{sin.dtype}; use contiguous()"
        )


def check_norm(
    query: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    rule: int,
    value_weight: torch.Tensor | None,
) -> None:
    """Raises ValueError for weights that do not go with the rule or the heads."""
    weights = (query_weight, key_weight) if value_weight is None else (query_weight, key_weight, value_weight)
    if rule == NO_NORM:
        if any(weight is not None for weight in weights):
            raise ValueError("weights need a rule, got weights without a norm; pass None")
        return
    if rule not in RULES:
        raise ValueError(f"rule must be {NO_NORM} or one of {RULES}, got {rule}; use the module's own forward")
    size, dtype = query.shape[2:], query.dtype
    if any(w is None or w.shape != size or w.dtype != dtype or not w.is_contiguous() for w in weights):
        got = " and ".join("None" if w is None else f"{w.dtype} {list(w.shape)}" for w in weights)
        raise ValueError(
            f"a norm needs contiguous weights [{query.shape[2]}] of dtype {dtype}, got {got}; use contiguous(), or "
            "rule NO_NORM without weights"
        )


def _has_adjacent_heads(part: torch.Tensor) -> bool:
    _, between, inside = part.stride()
    return inside == 1 and (between == part.shape[2] or part.shape[1] == 1)
