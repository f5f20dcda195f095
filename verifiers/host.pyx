"""Traversal's thresholds and the last draw on a CPU, compiled: one pass over nodes, two over one row per trajectory.

The same formulas as `traversal.traverse` and `draw.draw_residuals`, in float64 throughout; those are array code and run
on any device. A step on a CPU is short, and a hundred small array operations would be a fifth of it.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t
from libcpp.vector cimport vector

ctypedef fused Law:
    float
    double

ctypedef fused Prob:
    float
    double

cdef double TINY = 1e-12  # a denominator below this is rounding


def thresholds(const int32_t[::1] token_ids not None, const int32_t[::1] parents not None,
               const int32_t[::1] offsets not None, const int32_t[:, ::1] support_ids not None,
               const Law[:, ::1] law not None, const Prob[:, ::1] probs not None):
    """(h [M], m [M, S], s [M]) float64 of traversal verification; see `TraversalVerifier`.

    token_ids, parents (row-local), support_ids, law: as in DraftBatch. offsets: [B + 1]. probs: [M, V]. Ids must be
    below V (`TargetRows.check`). Parents stand before children and siblings in reveal order, so when a node is reached
    its parent's mass is what is owed once all earlier siblings failed.
    """
    cdef Py_ssize_t num_nodes = token_ids.shape[0], width = support_ids.shape[1]
    passing = np.empty(num_nodes)
    masses = np.zeros((num_nodes, width))
    scales = np.empty(num_nodes)
    cdef double[::1] h = passing, s = scales
    cdef double[:, ::1] m = masses
    cdef vector[double] tails = vector[double](num_nodes)
    cdef Py_ssize_t row, node, parent, slot
    cdef double owed, known
    with nogil:
        for row in range(offsets.shape[0] - 1):
            for node in range(offsets[row], offsets[row + 1]):
                owed = 1.0
                if parents[node] >= 0:
                    parent = offsets[row] + parents[node]
                    owed = _inherit(support_ids[parent], m[parent], law[node], token_ids[node])
                    s[parent] *= _fail(m[parent], law[node])
                known = 0.0
                for slot in range(width):
                    if support_ids[node, slot] >= 0:
                        known += probs[node, support_ids[node, slot]]
                        m[node, slot] = owed * probs[node, support_ids[node, slot]]
                s[node] = owed
                tails[node] = max(0.0, 1.0 - known)
        for row in range(offsets.shape[0] - 1):
            for node in range(offsets[row], offsets[row + 1]):
                known = s[node] * tails[node]
                for slot in range(width):
                    known += m[node, slot]
                h[node] = min(1.0, known) if parents[node] >= 0 else 1.0
    return passing, masses, scales


cdef double _inherit(const int32_t[::1] support, double[::1] mass, const Law[::1] law, int32_t token) noexcept nogil:
    """a = min(1, m(x) / q(x)), or 0 where the law cannot have drawn x."""
    cdef Py_ssize_t slot
    for slot in range(support.shape[0]):
        if support[slot] == token:
            return min(1.0, mass[slot] / law[slot]) if law[slot] > 0 else 0.0
    return 0.0


cdef double _fail(double[::1] mass, const Law[::1] law) noexcept nogil:
    """m <- (m - q)+ / (1 - sum min(m, q)) in place; returns what the rest of the vocabulary is scaled by."""
    cdef Py_ssize_t slot
    cdef double failure = 1.0
    for slot in range(mass.shape[0]):
        failure -= min(mass[slot], <double> law[slot])
    if failure <= TINY:
        return 1.0
    for slot in range(mass.shape[0]):
        mass[slot] = max(0.0, mass[slot] - law[slot]) / failure
    return 1.0 / failure


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
