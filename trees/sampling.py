"""One node's children, given its noise: for tests and tools."""

from __future__ import annotations

import numpy as np

from stand.trees.arguments import whole
from stand.trees.kinds import KIND_NUMBERS, KINDS
from stand.trees.lookups import children_of


def draw_children(
    kind: str, probabilities: np.ndarray, uniforms: np.ndarray, num_children: int
) -> tuple[np.ndarray, np.ndarray]:
    """(picks int32[K], laws float32[K, S]): children of one node, given its noise; for tests and tools.

    kind: one of KINDS. probabilities float32[S]: of the candidates, positive, in descending order. uniforms
    float64[S]: one number in (0, 1) per candidate. num_children: wanted, at least 1; K is less where candidates are.

    Raises ValueError otherwise.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}; others need a shape")
    if not 1 <= whole(num_children, "num_children") < 2**31:
        raise ValueError(f"num_children must be in [1, 2**31), got {num_children}; one at least")
    probabilities, uniforms = np.asarray(probabilities, dtype=np.float32), np.asarray(uniforms, dtype=np.float64)
    if probabilities.ndim != 1 or len(probabilities) == 0 or uniforms.shape != probabilities.shape:
        raise ValueError(
            f"uniforms must match probabilities and not be empty, got shape {uniforms.shape} for "
            f"{probabilities.shape}; give each candidate one"
        )
    if not (probabilities[-1] > 0.0 and (probabilities[1:] <= probabilities[:-1]).all()):
        raise ValueError(f"probabilities must be positive and descend, got {probabilities}; sort them")
    if not ((uniforms > 0.0) & (uniforms < 1.0)).all():
        raise ValueError(f"uniforms must lie in (0, 1), got {uniforms}; draw them by noise.uniforms")
    return children_of(KIND_NUMBERS[kind], probabilities, uniforms, num_children)
