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
# By all copies: large and constant, or made to be shared. Classes of grammar libraries are known by their full names.
SHARED = (PreTrainedTokenizerBase, torch.nn.Module, Event, ModuleType)
SHARED_NAMES = {
    "xgrammar.compiler.CompiledGrammar",
    "xgrammar.compiler.GrammarCompiler",
    "xgrammar.tokenizer_info.TokenizerInfo",
    "xgrammar.grammar.Grammar",
    "builtins.LLTokenizer",  # of llguidance, whose matchers are not among these: copies may share what they know
    "builtins.LLExecutor",
    "outlines_core.Index",
    "outlines_core.Vocabulary",
}
FORKED_NAMES = {"xgrammar.matcher.GrammarMatcher": "fork"}  # by the method that copies: there is no other way


def own_copy(part: object, rule: str) -> object:
    """A copy of an object of the caller's, or of a list of them, that shares what is SHARED.

    Raises ValueError, which begins with `rule`, where a class cannot be copied.
    """
    parts = part if isinstance(part, list) else [part]
    names = ", ".join(type(one).__name__ for one in parts)
    try:
        return copy.deepcopy(part, _copied(parts))
    except Exception as error:  # a class may raise anything from its copying
        raise ValueError(
            f"{rule}, got {names} with {type(error).__name__}: {error}; keep a flag in a "
            "threading.Event, which copies share (where a class copies itself, as an attribute), or give the class a "
            "__deepcopy__"
        ) from error


def _copied(parts: Sequence[object]) -> dict[int, object]:
    """SHARED objects within `parts`, and forks of others, by their ids: `deepcopy` takes them for copied already. Of
    what is copied by a `__deepcopy__` of its own, which may copy every attribute, these are looked at and not into."""
    found: dict[int, object] = {}
    seen: set[int] = set()
    waiting = [inner for part in parts for inner in _inside(part)]
    while waiting:
        one = waiting.pop()
        if isinstance(one, LEAVES) or id(one) in seen or isinstance(one, (type, FunctionType)):
            continue
        seen.add(id(one))
        if _is_shared(one):
            found[id(one)] = one
        elif full_name(one) in FORKED_NAMES:
            found[id(one)] = getattr(one, FORKED_NAMES[full_name(one)])()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting += one
        else:
            waiting += _inside(one)
    return found


def _is_shared(one: object) -> bool:
    return isinstance(one, SHARED) or full_name(one) in SHARED_NAMES


def full_name(one: object) -> str:
    """Of an object's class."""
    return f"{type(one).__module__}.{type(one).__qualname__}"


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
        attached = (*slots, *(attributes or {}).values())
        return [inner for inner in attached if _is_shared(inner) or full_name(inner) in FORKED_NAMES]
    return [*given, *slots, attributes]
