"""Random numbers without a state: a uniform is a function of its key (seed, stream, row, step, node, slot).

Streams are independent of each other, so that drafting, accepting and resampling never share a number (a ratio rule
that shares them is lossy). The context is never part of a key. The generator is described in noise.h.
"""

from stand.trees.compiled import (
    ACCEPT,
    DRAFT,
    FIRST_FACTOR,
    GOLDEN_GAMMA,
    RESAMPLE,
    SECOND_FACTOR,
    TARGET,
    fill_tests,
    node_uniforms,
    step_keys,
    uniforms,
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
