"""What a module's own forward runs: who has proven or recorded it compares this, and so sees another class or file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache

from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

SET_FOR_EXPERTS = "is_concatenated"  # by transformers' `use_experts_implementation`, as a module is made
PLAIN = (bool, int, float, str, type(None))  # values of settings that are told apart


def code_of(module: nn.Module) -> tuple[object, ...]:
    """What a module's own forward runs: its class, that class's forward, and the rotary positions, or the experts' gate
    and products, that this calls."""
    forward = type(module).forward
    names = _names_seen_by(forward)
    code = type(module), forward, *map(names.get, ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"))
    return (*code, *_code_of_experts(module)) if SET_FOR_EXPERTS in module.__dict__ else code


def _code_of_experts(module: nn.Module) -> tuple[object, ...]:
    way = getattr(module.config, "_experts_implementation", None)
    gate = vars(module).get("_apply_gate", type(module)._apply_gate)  # no method, which would keep the module alive
    return gate, way, ALL_EXPERTS_FUNCTIONS.get(way)


@lru_cache(maxsize=256)
def _names_seen_by(forward: Callable) -> Mapping[str, object]:
    """Its file's names as they are whenever this is read; of what decorators have wrapped, the inmost."""
    return getattr(inspect.unwrap(forward), "__globals__", {})
