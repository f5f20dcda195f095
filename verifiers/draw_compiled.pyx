"""The draw of the next token on a CPU, compiled: two passes over one row of probabilities per trajectory.

The same formulas as `draw.draw_residuals`, in float64 throughout; that one is array code and runs on any device.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t
from libcpp.vector cimport vector

ctypedef fused Prob:
    float
    double

def draw_residuals(const Prob[:, ::1] probs not None, const int64_t[::1] nodes not None,
                   const int32_t[:, ::1] support_ids not None, const double[:, ::1] mass not None,
                   const double[::1] scale not None, const double[::1] uniforms not None):
    """[B] int64: token ids drawn from weights {mass on the support, scale x probs elsewhere} at each of `nodes` [B].

    probs: [M, V]; support_ids, mass: [M, S]; scale: [M]; uniforms: [B] in [0, 1). The support comes first in the CDF,
    then the other tokens in ascending order. Weights that are all zero (they underflowed) give way to the target law.

    Raises ValueError where a row of `probs` has no positive sum.
    """
    cdef Py_ssize_t place
    cdef int64_t token = 0
    tokens = np.empty(len(nodes), dtype=np.int64)
    cdef int64_t[::1] drawn = tokens
    cdef vector[char] is_known = vector[char](probs.shape[1], 0)
    cdef Py_ssize_t node
    with nogil:
        for place in range(nodes.shape[0]):
            node = nodes[place]
            token = _draw(probs[node], support_ids[node], mass[node], scale[node], uniforms[place], is_known)
            if token < 0:  # no weight at all
                token = _draw(probs[node], support_ids[node, :0], mass[node, :0], 1.0, uniforms[place], is_known)
            if token < 0:
                break
            drawn[place] = token
    if token < 0:
        raise ValueError("every target row must have a positive sum, got none; look for NaN or -inf-only logits")
    return tokens


cdef int64_t _draw(const Prob[::1] probs, const int32_t[::1] support, const double[::1] mass, double scale,
                   double uniform, vector[char]& is_known) noexcept nogil:
    """The first token whose cumulated weight exceeds uniform x total; the last one of positive weight where rounding
    carries the sum past the end; -1 unless the total is positive. `is_known` [V] is all zero before and after."""
    cdef Py_ssize_t slot, token
    cdef double on_support = 0.0, others = 0.0, total, point, weight
    cdef int64_t last = -1  # the token that was looked at
    cdef bint found = False
    for slot in range(support.shape[0]):
        if support[slot] >= 0:
            on_support += mass[slot]
            is_known[support[slot]] = 1
    for token in range(probs.shape[0]):
        others += 0.0 if is_known[token] else <double> probs[token]
    total = on_support + scale * others
    point = uniform * total
    for slot in range(support.shape[0]):
        if total > 0 and support[slot] >= 0 and mass[slot] > 0 and not found:
            last = support[slot]
            point -= mass[slot]
            found = point < 0
    if total > 0 and not found:
        for token in range(probs.shape[0]):
            weight = 0.0 if is_known[token] else scale * probs[token]
            if weight > 0:
                last = token
                point -= weight
                if point < 0:
                    break
    for slot in range(support.shape[0]):
        if support[slot] >= 0:
            is_known[support[slot]] = 0
    return last
