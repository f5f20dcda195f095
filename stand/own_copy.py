"""Copies of a caller's processors and criteria: every row, and every draft node, goes on with one of its own."""

from __future__ import annotations

import copy
from threading import Event
from types import FunctionType, ModuleType

import torch
from transformers import PreTrainedTokenizerBase

SHARED = (PreTrainedTokenizerBase, torch.nn.Module, Event)  # by all copies: large and constant, or made to be shared
NOT_COPIED = (type, FunctionType, ModuleType)


def own_copy(part: object, rule: str) -> object:
    """`part`, or a list of such parts, copied but for the SHARED objects that it holds.

    Raises ValueError, which begins with `rule`, where a class cannot be copied.
    """
    try:
        return copy.deepcopy(part, _shared(part))
    except Exception as error:  # a class may raise anything from its copying
        names = [type(one).__name__ for one in (part if isinstance(part, list) else [part])]
        raise ValueError(
            f"{rule}, got {', '.join(names)} with {type(error).__name__}: {error}; keep a flag in a threading.Event, "
            "which copies share, or give the class a __deepcopy__"
        ) from error


def _shared(part: object) -> dict[int, object]:
    """What `deepcopy` is to take for copied already: SHARED objects within `part`, by their ids."""
    found: dict[int, object] = {}
    seen: set[int] = set()
    waiting = [getattr(one, "__dict__", None) for one in (part if isinstance(part, list) else [part])]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, NOT_COPIED):
            continue
        seen.add(id(one))
        if isinstance(one, SHARED):
            found[id(one)] = one
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting += one
        else:
            waiting.append(getattr(one, "__dict__", None))
    return found
