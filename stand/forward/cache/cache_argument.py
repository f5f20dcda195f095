"""The argument by which a module takes its cache: `cache` since transformers 5.24, `past_key_values` before."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

from torch import nn
from transformers import LlamaModel

CACHE_ARGUMENTS = ("cache", "past_key_values")


def cache_argument(module: nn.Module) -> str:
    """Of a model, a decoder layer or an attention; where its class takes anything by name, what transformers' take.

    >>> model(input_ids=token_ids, **{cache_argument(model): keys})
    """
    return _argument_of(type(module).forward)


@cache
def _argument_of(forward: Callable) -> str:
    parameters = inspect.signature(forward).parameters
    named = [name for name in CACHE_ARGUMENTS if name in parameters]
    return named[0] if named else _argument_of(LlamaModel.forward)
