"""Cases of a test of which some are run every day and all among the slow tests."""

from collections.abc import Iterable

import pytest


def every_day(cases: Iterable[str], *daily: str) -> list:
    """Parameters: `cases`, of which those not in `daily` are slow."""
    return [case if case in daily else pytest.param(case, marks=pytest.mark.slow) for case in cases]
