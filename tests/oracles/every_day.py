"""Cases of a test of which some are run every day and all among the slow tests."""

from collections.abc import Iterable

import pytest


def every_day(cases: Iterable[str], *daily: str) -> list:
    """Parameters: `cases`, of which those not in `daily` are slow. What is not among the cases is left out, since not
    every transformers has every family; ValueError where nothing is left."""
    cases = list(cases)
    if not set(cases) & set(daily):
        raise ValueError(
            f"daily must name one of the cases {cases}, got {list(daily)}; else the test is slow as a whole"
        )
    return [case if case in daily else pytest.param(case, marks=pytest.mark.slow) for case in cases]
