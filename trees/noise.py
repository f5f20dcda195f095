"""Random numbers without a state: a uniform is a function of its key (seed, stream, row, step, node, slot).

Streams are independent of each other, so that drafting, accepting and resampling never share a number (a ratio rule
that shares them is lossy). The context is never part of a key. The generator stands in noise.h.
"""

from __future__ import annotations

import numpy as np

from stand.trees.longest_match.lookup import fill_uniforms

DRAFT = 1  # DRAFT_STREAM of noise.h
ACCEPT = 2
RESAMPLE = 3
TARGET = 4  # TARGET_STREAM of noise.h


def uniforms(seed: int, stream: int, rows, steps, nodes, *, slot: int = 0) -> np.ndarray:
    """float64 uniforms in (0, 1), one per (row, step, node); the arguments broadcast against each other.

    seed and stream are in [0, 2**64); rows, steps, nodes and slot in [0, 2**32). Raises ValueError otherwise.
    """
    if not (0 <= seed < 2**64 and 0 <= stream < 2**64):
        raise ValueError(f"seed and stream must be in [0, 2**64), got {seed} and {stream}")
    words = np.empty((3, *np.broadcast(rows, steps, nodes).shape), dtype=np.int64)
    words[0], words[1], words[2] = rows, steps, nodes
    out = np.empty(words.shape[1:], dtype=np.float64)
    flat = words.reshape(3, -1)
    if not fill_uniforms(seed, stream, flat[0], flat[1], flat[2], slot, out.reshape(-1)):
        raise ValueError("rows, steps, nodes and slot must be in [0, 2**32); number rows and steps from 0")
    return out
