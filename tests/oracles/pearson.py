"""Pearson's test of counts against what a law expects."""

from collections.abc import Sequence

import numpy as np
import torch

LEAST_EXPECTED = 5.0  # of a cell; those that expect less are one cell together


def p_value(counts: Sequence[float] | np.ndarray, expected: Sequence[float] | np.ndarray) -> float:
    """The chance of counts that are further from `expected` than these; of either one number per cell."""
    seen, expected = np.asarray(counts, np.float64), np.asarray(expected, np.float64)
    rare = expected < LEAST_EXPECTED
    if rare.any():
        seen = np.append(seen[~rare], seen[rare].sum())
        expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    statistic = float(((seen - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
