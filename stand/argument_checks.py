"""Checks of what callers pass: flags, counts, and filters of laws."""

from __future__ import annotations

import math
import operator
from numbers import Real


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


def check_number(name: str, value: object, remedy: str) -> None:
    """ValueError for what is neither None nor a number, booleans among it."""
    if value is not None and (not isinstance(value, Real) or isinstance(value, bool)):
        raise ValueError(f"{name} must be a number, got {value!r}; {remedy}")


def check_positive(name: str, value: object, remedy: str) -> None:
    """ValueError for what is neither None nor a finite number above 0, booleans among it."""
    if value is None:
        return
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}; {remedy}")


def check_count(name: str, value: object, remedy: str, *, least: int = 1) -> None:
    """ValueError for what is neither None nor Python's integer from `least` on, booleans among it."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}; {remedy}")


def check_filters(
    size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    count: int,
    vectors: str | None,
    known_vectors: tuple[str, ...],
) -> None:
    """Raise ValueError where `filter_laws` cannot filter laws over `size` tokens with these arguments."""
    if size < 1:
        raise ValueError("scores must have at least one column, got 0; pass [M, V] with V >= 1")
    if not 1e-30 <= temperature <= 1e30:
        raise ValueError(
            f"temperature must be in [1e-30, 1e30], got {temperature}; take the best token for greedy decoding"
        )
    if not (top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1):
        raise ValueError(
            f"top_k must be >= 0, top_p in (0, 1], min_p in [0, 1], got {top_k}, {top_p} and {min_p}; "
            "0, 1 and 0 switch them off"
        )
    if not 0 <= count <= size:
        raise ValueError(f"count must be in [0, {size}], the number of tokens, got {count}; ask for fewer")
    if vectors is not None and vectors not in known_vectors:
        raise ValueError(f"vectors must be one of {known_vectors}, got {vectors!r}; leave it out for the widest")
