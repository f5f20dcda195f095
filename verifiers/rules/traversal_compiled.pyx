"""Traversal's thresholds on a CPU, compiled: one pass over the nodes.

The same formulas as `traversal.traverse`, in float64 throughout; that one is array code and runs on any device. A step
on a CPU is short, and a hundred small array operations would be a fifth of it.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t
from libcpp.vector cimport vector

ctypedef fused Prob:
    float
    double

cdef double TINY = 1e-12  # a denominator below this is rounding


def thresholds(token_ids, parents, offsets, support_ids, law, probs):
    """(h [M], m [M, S], s [M]) float64 of traversal verification; see `TraversalVerifier`.

    token_ids, parents (row-local), support_ids, law: as in DraftBatch. offsets: [B + 1]. probs: [M, V]. Ids must be
    below V (`TargetRows.check`). Parents stand before children and siblings in reveal order, so when a node is reached
    its parent's mass is what is owed once all earlier siblings failed. All in C order; ids int32, law and probs float32
    or float64.
    """
    num_nodes, width = support_ids.shape
    passing, masses, scales = np.empty(num_nodes), np.zeros((num_nodes, width)), np.empty(num_nodes)
    tree = token_ids, parents, offsets, support_ids
    law = law.astype(np.float64, copy=False)  # a small array: code for two types would take more room
    if probs.itemsize == 4:
        _settle[float](tree, law, probs, passing, masses, scales)
    else:
        _settle[double](tree, law, probs, passing, masses, scales)
    return passing, masses, scales


cdef _settle(tree, const double[:, ::1] law, const Prob[:, ::1] probs, double[::1] h, double[:, ::1] m, double[::1] s):
    cdef const int32_t[::1] token_ids = tree[0], parents = tree[1], offsets = tree[2]
    cdef const int32_t[:, ::1] support_ids = tree[3]
    cdef Py_ssize_t num_nodes = token_ids.shape[0], width = support_ids.shape[1]
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
                h[node] = _capped(known) if parents[node] >= 0 else 1.0


cdef double _inherit(const int32_t[::1] support, double[::1] mass, const double[::1] law, int32_t token) noexcept nogil:
    """a = min(1, m(x) / q(x)), or 0 where the law cannot have drawn x."""
    cdef Py_ssize_t slot
    for slot in range(support.shape[0]):
        if support[slot] == token:
            return _capped(mass[slot] / law[slot]) if law[slot] > 0 else 0.0
    return 0.0


cdef double _capped(double chance) noexcept nogil:
    """At most 1. NaN, of a target row that is broken, is 0: no draft is kept for it, and the next token's draw says so."""
    return chance if chance < 1.0 else 1.0 if chance >= 1.0 else 0.0


cdef double _fail(double[::1] mass, const double[::1] law) noexcept nogil:
    """m <- (m - q)+ / (1 - sum min(m, q)) in place; returns what the rest of the vocabulary is scaled by."""
    cdef Py_ssize_t slot
    cdef double failure = 1.0
    for slot in range(mass.shape[0]):
        failure -= min(mass[slot], law[slot])
    if failure <= TINY:
        return 1.0
    for slot in range(mass.shape[0]):
        mass[slot] = max(0.0, mass[slot] - law[slot]) / failure
    return 1.0 / failure
