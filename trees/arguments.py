"""Checks of what lookups are given: every error says the rule, what was got, and what to do."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


def whole(value: Any, name: str) -> int:
    """The value as Python's integer; ValueError where it is none, so that no fraction is cut off."""
    if type(value) is int:
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}; pass an integer") from None


def real(value: Any, name: str) -> float:
    """The value as Python's float; ValueError where it is none. Texts are none."""
    if type(value) is float:
        return value
    try:
        return value.__float__()
    except (AttributeError, TypeError):
        raise ValueError(f"{name} must be a number, got {value!r}; pass a float") from None


def within(value: Any, name: str, least: float, most: float, usual: float) -> float:
    """The value as a number of the kind of `least`; ValueError where it is none in [least, most], or a boolean."""
    if isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be a number, got {value}; {usual} is usual")
    number = whole(value, name) if type(least) is int else real(value, name)
    if not least <= number <= most:
        raise ValueError(f"{name} must be in [{least:g}, {most:g}], got {value}; {usual} is usual")
    return number


def int32_array(values: Any, name: str) -> np.ndarray:
    """The values as a C-contiguous int32 array; ValueError where one is no whole number or does not fit."""
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.flags.c_contiguous:
        return values
    array = np.asarray(values)
    if array.dtype != np.int32 and array.size > 0:
        if array.dtype.kind not in "iu":
            raise ValueError(f"{name} must hold whole numbers below 2**31, got {array.dtype}; token ids are int32")
        low, high = array.min(), array.max()
        if low < -(2**31) or high >= 2**31:
            wrong = low if low < -(2**31) else high
            raise ValueError(f"{name} must be in [-2**31, 2**31), got {wrong}; token ids are int32")
    return np.ascontiguousarray(array, dtype=np.int32)


def int64_array(values: Any, name: str) -> np.ndarray:
    """The values as an int64 array in C order; ValueError where one is no whole number or does not fit."""
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and values.flags.c_contiguous:
        return values
    array = np.asarray(values)
    if array.size > 0 and (array.dtype.kind not in "iu" or array.max() >= 2**63):
        got = array.max() if array.dtype.kind == "u" else array.dtype
        raise ValueError(f"{name} must hold whole numbers below 2**63, got {got}; pass integers")
    return np.asarray(array, dtype=np.int64, order="C")


def vector(values: Any, name: str) -> np.ndarray:
    """`int32_array` of one dimension."""
    array = int32_array(values, name)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}; pass one list of tokens")
    return array


def tail(tokens: Any, num_tokens: int) -> np.ndarray:
    """The last tokens of a history, without converting the rest of it."""
    return vector(tokens[max(0, len(tokens) - num_tokens) :], "context")


def checked_nodes(nodes: Any, num_nodes: int) -> np.ndarray:
    """int64[:], indices of packed nodes; None for all."""
    if nodes is None:
        return np.arange(num_nodes, dtype=np.int64)
    nodes = int64_array(nodes, "nodes")
    if nodes.ndim != 1 or np.any(nodes < 0) or np.any(nodes >= num_nodes):
        raise ValueError(f"nodes must be a list of indices in [0, {num_nodes}), got {nodes.tolist()}; None is all")
    return nodes


def check_is_batch(batch: Any) -> None:
    """TypeError where it has not what a DraftBatch has."""
    for name in ("token_ids", "parents", "offsets", "path_estimates"):
        if not hasattr(batch, name):
            raise TypeError(f"batch must be a DraftBatch, got {type(batch).__name__}; pass what draft() returns")
