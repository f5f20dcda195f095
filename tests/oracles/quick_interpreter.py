"""Triton's interpreter without two of its habits, which take more than half of its time and decide nothing.

At every call of a function within a kernel it looks for `triton.language` to replace, though that was replaced when the
kernel began. And it computes every sum and product of integers again in 64 bits, for an assertion that is only made
with `debug`; compiled kernels leave that out too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import triton.language as tl
from triton.runtime import interpreter

BUILDER = interpreter.interpreter_builder
OWN_REPLACE, OWN_OPTIONS = interpreter._patch_lang, BUILDER.options  # Triton's


def make_quick() -> None:
    """Of the interpreter of this process, until it ends."""
    interpreter._patch_lang = _where_not_yet_replaced(OWN_REPLACE)
    BUILDER.options = dataclasses.replace(OWN_OPTIONS, sanitize_overflow=False)


def _where_not_yet_replaced(replace: Callable) -> Callable:
    def replaced(function: Callable) -> interpreter._LangPatchScope:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        is_as_imported = any(tl.core.is_builtin(language.load) for language in languages)
        return replace(function) if is_as_imported else interpreter._LangPatchScope()

    return replaced
