"""Random numbers without a state: a uniform is a function of its key (seed, stream, row, step, node, slot).

Streams are independent of each other, so that drafting, accepting and resampling never share a number (a ratio rule
that shares them is lossy). The context is never part of a key. The generator is described in noise.h.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stand.trees.arguments import int64_array, whole
from stand.trees.compiled import (
    ACCEPT,
    DRAFT,
    FIRST_FACTOR,
    GOLDEN_GAMMA,
    RESAMPLE,
    SECOND_FACTOR,
    TARGET,
    check_stream,
    fill_tests,
    fill_uniforms,
    node_uniforms,
    step_keys,
)

__all__ = [
    "ACCEPT",
    "DRAFT",
    "FIRST_FACTOR",
    "GOLDEN_GAMMA",
    "RESAMPLE",
    "SECOND_FACTOR",
    "TARGET",
    "fill_tests",
    "node_uniforms",
    "step_keys",
    "uniforms",
]

WORDS = 1 << 32  # of rows, steps, nodes and slots
Numbers = int | Sequence[int] | np.ndarray


def uniforms(seed: int, stream: int, rows: Numbers, steps: Numbers, nodes: Numbers, *, slot: int = 0) -> np.ndarray:
    """float64 uniforms in (0, 1), one per (row, step, node); the arguments broadcast against each other.

    seed and stream are in [0, 2**64); rows, steps, nodes and slot in [0, 2**32). Raises ValueError otherwise.
    """
    check_stream(seed, stream)
    numbers = int64_array(rows, "rows"), int64_array(steps, "steps"), int64_array(nodes, "nodes")
    words = np.stack(np.broadcast_arrays(*numbers))
    out = np.empty(words.shape[1:], dtype=np.float64)
    is_slot = 0 <= whole(slot, "slot") < WORDS
    if not is_slot or not fill_uniforms(seed, stream, words.reshape(3, -1), slot, out.reshape(-1)):
        raise ValueError("rows, steps, nodes and slot must be in [0, 2**32), got others; number rows and steps from 0")
    return out
