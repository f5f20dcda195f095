"""Checks of drafters' settings."""

from __future__ import annotations

import numpy as np

from stand.laws.sampling import LEAST, MOST


def check_count(name: str, value: object, least: int, most: int | None = None, *, usual: str) -> None:
    """Raise ValueError unless `value` is an integer of at least `least` and at most `most`; usual: the remedy."""
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        rule = f"of at least {least}" if most is None else f"in [{least}, {most}]"
        raise ValueError(f"{name} must be an integer {rule}, got {value!r}; {usual}")


def check_temperature(value: object) -> None:
    """Raise ValueError unless a law can be taken at this temperature."""
    is_number = isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)
    if not is_number or not LEAST <= value <= MOST:
        raise ValueError(
            f"temperature must be a number in [{LEAST:g}, {MOST:g}], got {value!r}; the target's own is best, 1 for "
            "greedy decoding"
        )
