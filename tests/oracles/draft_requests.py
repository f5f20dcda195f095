"""Requests to a drafter, as an engine makes them, for tests that ask it by themselves."""

from collections.abc import Sequence

import numpy as np

import stand


def draft_request(
    histories: Sequence[np.ndarray],
    *,
    seed: int = 0,
    first_row: int = 0,
    first_problem: int = 0,
    step: int = 0,
    max_depth: int = 1000,
    is_greedy: bool = False,
) -> stand.DraftRequest:
    """Rows first_row, first_row + 1, ... of problems first_problem, first_problem + 1, ..."""
    rows = np.arange(len(histories))
    return stand.DraftRequest(
        histories=histories,
        seed=seed,
        target_seed=seed,
        rows=rows + first_row,
        steps=np.full(len(rows), step),
        problems=rows + first_problem,
        max_depths=np.full(len(rows), max_depth),
        is_greedy=is_greedy,
    )
