"""Copies of objects of the caller's, which may keep a state: a processor for every draft node, a criterion for every
row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from threading import Event
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

LEAVES = (int, float, complex, str, bytes, type(None), np.ndarray, np.generic, torch.Tensor)  # hold nothing shared
SHARED = (PreTrainedTokenizerBase, torch.nn.Module, Event)  # by all copies: large and constant, or made to be shared


def own_copy(part: object, rule: str) -> object:
    """A copy of an object of the caller's, or of a list of them, that shares what is SHARED.

    Raises ValueError, which begins with `rule`, where a class cannot be copied.
    """
    parts = part if isinstance(part, list) else [part]
    names = ", ".join(type(one).__name__ for one in parts)
    try:
        return copy.deepcopy(part, _shared(parts))
    except Exception as error:  # a class may raise anything from its copying
        raise ValueError(
            f"{rule}, got {names} with {type(error).__name__}: {error}; keep a flag in a "
            "threading.Event, which copies share (where a class copies itself, as an attribute), or give the class a "
            "__deepcopy__"
        ) from error


def _shared(parts: Sequence[object]) -> dict[int, object]:
    """SHARED objects within `parts` by their ids: `deepcopy` takes them for copied already. Of what is copied by a
    `__deepcopy__` of its own, which may copy every attribute, these are looked at and not into."""
    found: dict[int, object] = {}
    seen: set[int] = set()
    waiting = [inner for part in parts for inner in _inside(part)]
    while waiting:
        one = waiting.pop()
        if isinstance(one, LEAVES) or id(one) in seen or isinstance(one, (type, FunctionType, ModuleType)):
            continue
        seen.add(id(one))
        if isinstance(one, SHARED):
            found[id(one)] = one
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting += one
        else:
            waiting += _inside(one)
    return found


def _inside(one: object) -> list[object]:
    """What a copy of an object copies: its attributes, a method's object, what a partial was given. Where it copies
    itself: attributes that are SHARED."""
    if isinstance(one, MethodType):
        return [one.__self__]
    given = [one.func, one.args, one.keywords] if isinstance(one, partial) else []
    slots = [
        getattr(one, name, None)
        for kind in type(one).__mro__ if "__slots__" in vars(kind)
        for name, part in vars(kind).items() if isinstance(part, MemberDescriptorType)
    ]  # fmt: skip
    attributes = getattr(one, "__dict__", None)
    if hasattr(one, "__deepcopy__"):
        return [inner for inner in (*slots, *(attributes or {}).values()) if isinstance(inner, SHARED)]
    return [*given, *slots, attributes]
