"""Checks of what callers pass: flags and counts."""

from __future__ import annotations

import operator


def check_flags(**flags: object) -> None:
    """ValueError where one is neither True nor False: what else is true or not is seldom what was meant."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}; leave it out for the default")


def whole_number(name: str, value: object, remedy: str, *, least: int = 1) -> int:
    """An argument of the engine's own that counts something, as Python's integer. A tensor or array of a fraction has
    an `__index__`, too, which fails.

    Raises ValueError for anything else, booleans among it."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}; {remedy}")
    return number
