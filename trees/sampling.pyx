"""How children are chosen: the kinds of drafts by name, and one node's children for tests and tools."""

from libc.stdint cimport int32_t
from libcpp.vector cimport vector

import numpy as np

from stand.trees.arguments import whole

cdef extern from "sampling.h" namespace "stand" nogil:
    cdef enum class DraftKind(int32_t):
        sampled
        mixed
        deterministic
        coupled
        independent

    const int32_t NUM_GROWN_KINDS

    cdef cppclass Children:
        vector[int32_t] picks
        vector[float] laws

    void c_draw_children "stand::draw_children"(DraftKind kind, const float* probabilities, const double* uniforms,
                                                int32_t size, int32_t num_children, Children& children) except +

# The number that C++ gives to each kind.
KIND_NUMBERS = {
    "sampled": <int32_t> DraftKind.sampled,
    "mixed": <int32_t> DraftKind.mixed,
    "deterministic": <int32_t> DraftKind.deterministic,
    "coupled": <int32_t> DraftKind.coupled,
    "independent": <int32_t> DraftKind.independent,
}
SHAPED_KINDS = tuple(KIND_NUMBERS)  # of drafts that fill a shape
KINDS = tuple(kind for kind, number in KIND_NUMBERS.items() if number < NUM_GROWN_KINDS)  # of all drafts


def draw_children(kind, const float[::1] probabilities not None, const double[::1] uniforms not None, num_children):
    """(picks int32[K], laws float32[K, S]): children of one node, given its noise; for tests and tools.

    kind: one of KINDS. probabilities float32[S]: of the candidates, positive, in descending order. uniforms
    float64[S]: one number in (0, 1) per candidate. num_children: wanted, at least 1; K is less where candidates are.

    Raises ValueError otherwise.
    """
    cdef Children children
    cdef int32_t size = probabilities.shape[0], place
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}; others need a shape")
    if not 1 <= whole(num_children, "num_children") < 2**31:
        raise ValueError(f"num_children must be in [1, 2**31), got {num_children}; one at least")
    if size == 0 or uniforms.shape[0] != size:
        raise ValueError(
            f"uniforms must match probabilities and not be empty, got {uniforms.shape[0]} for {size}; give each "
            "candidate one"
        )
    for place in range(size):
        if not 0.0 < probabilities[place] <= probabilities[max(0, place - 1)]:
            raise ValueError(f"probabilities must be positive and descend, got {probabilities[place]}; sort them")
    if not all(0.0 < number < 1.0 for number in uniforms):
        raise ValueError(f"uniforms must lie in (0, 1), got {np.asarray(uniforms)}; draw them by noise.uniforms")
    cdef DraftKind wanted = <DraftKind> <int32_t> KIND_NUMBERS[kind]
    c_draw_children(wanted, &probabilities[0], &uniforms[0], size, num_children, children)
    picks = np.array([children.picks[i] for i in range(children.picks.size())], dtype=np.int32)
    laws = np.array([children.laws[i] for i in range(children.laws.size())], dtype=np.float32)
    return picks, laws.reshape(len(picks), size)
