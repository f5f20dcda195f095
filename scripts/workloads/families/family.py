"""One kind of problem: how it is drawn, stated, answered and worked out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """How to draw operands, state a problem, answer it, and work it out: from the start, and as a check."""

    draw: Callable[[random.Random], tuple[int, ...]]
    state: Callable[..., str]
    answer: Callable[..., int]
    solve: Callable[..., str]
    check: Callable[..., str]
    check_may_lead: bool  # the check does not use the answer, so it may come first
