"""Verdicts on a CPU, compiled: traversal's thresholds, the draw of the next token, and what the rows gain.

Thresholds take one pass over the nodes, with the formulas of `rules.traversal.traverse`; the draw passes over one row
of probabilities per trajectory, then over one block, with those of `draw`. All is float64 throughout. Those two are
array code and run on any device, but a step on a CPU is short, and a hundred small array operations would be a fifth of
it.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t
from libcpp.vector cimport vector as cpp_vector

cdef extern from "../verifiers/sum.h" namespace "stand" nogil:
    double sum_of "stand::sum"[Number](const Number* numbers, Py_ssize_t count)

ctypedef fused Prob:
    float
    double

cdef double TINY = 1e-12  # a denominator below this is rounding

cdef enum:
    BLOCK_SIZE = 256  # tokens whose weights are added up before one of them is looked for


def traversal_thresholds(token_ids, parents, offsets, support_ids, law, probs):
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
    cdef cpp_vector[double] tails = cpp_vector[double](num_nodes)
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
    """At most 1. NaN, of a broken target row, is 0: no draft is kept for it, and the next token's draw says so."""
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


def draw_tokens(probs, nodes, uniforms):
    """[B] int64: token ids drawn from probs [M, V] at each of `nodes` [B], with uniforms [B] in [0, 1).

    Raises ValueError where a row of `probs` has no positive sum.
    """
    size = len(probs)
    return draw_residuals(
        probs, nodes, np.empty((size, 0), dtype=np.int32), np.empty((size, 0)), np.ones(size), uniforms
    )


def draw_residuals(probs, const int64_t[::1] nodes not None, const int32_t[:, ::1] support_ids not None,
                   const double[:, ::1] mass not None, const double[::1] scale not None,
                   const double[::1] uniforms not None):
    """[B] int64: token ids drawn from weights {mass on the support, scale x probs elsewhere} at each of `nodes` [B].

    probs: [M, V] float32 or float64, in C order; support_ids, mass: [M, S]; scale: [M]; uniforms: [B] in [0, 1). The
    support comes first in the CDF, then the other tokens in ascending order. Weights that are all zero (they
    underflowed) give way to the target law.

    Raises ValueError where a row of `probs` has no positive sum.
    """
    tokens = np.empty(len(nodes), dtype=np.int64)
    if probs.itemsize == 4:
        _draw_all[float](probs, nodes, support_ids, mass, scale, uniforms, tokens)
    else:
        _draw_all[double](probs, nodes, support_ids, mass, scale, uniforms, tokens)
    return _checked(tokens)


cdef _draw_all(const Prob[:, ::1] probs, const int64_t[::1] nodes, const int32_t[:, ::1] support_ids,
               const double[:, ::1] mass, const double[::1] scale, const double[::1] uniforms, int64_t[::1] drawn):
    cdef cpp_vector[char] is_known = cpp_vector[char](probs.shape[1], 0)
    cdef cpp_vector[double] sums = cpp_vector[double]((probs.shape[1] + BLOCK_SIZE - 1) // BLOCK_SIZE)
    cdef Py_ssize_t place, node
    with nogil:
        for place in range(nodes.shape[0]):
            node = nodes[place]
            drawn[place] = _draw(
                probs[node], support_ids[node], mass[node], scale[node], uniforms[place], is_known, sums
            )
            if drawn[place] < 0:  # no weight at all
                drawn[place] = _draw(
                    probs[node], support_ids[node, :0], mass[node, :0], 1.0, uniforms[place], is_known, sums
                )


cdef _checked(tokens):
    if len(tokens) and tokens.min() < 0:
        raise ValueError("every target row must have a positive sum, got none; look for NaN or -inf-only logits")
    return tokens


cdef int64_t _draw(const Prob[::1] probs, const int32_t[::1] support, const double[::1] mass, double scale,
                   double uniform, cpp_vector[char]& is_known, cpp_vector[double]& sums) noexcept nogil:
    """The first token whose cumulated weight exceeds uniform x total; the last one of positive weight where rounding
    carries the sum past the end; -1 unless the total is positive. `is_known` [V] is all zero before and after; sums:
    scratch memory, one per block."""
    cdef Py_ssize_t slot
    cdef double on_support = 0.0, total, point
    cdef int64_t last = -1  # the token that was looked at
    cdef bint found = False
    for slot in range(support.shape[0]):
        if support[slot] >= 0:
            on_support += mass[slot]
            is_known[support[slot]] = 1
    total = on_support + scale * _sum_blocks(probs, support, is_known, sums)
    point = uniform * total
    for slot in range(support.shape[0]):
        if total > 0 and support[slot] >= 0 and mass[slot] > 0 and not found:
            last = support[slot]
            point -= mass[slot]
            found = point < 0
    if total > 0 and not found:
        last = _find(probs, scale, point, is_known, sums, last)
    for slot in range(support.shape[0]):
        if support[slot] >= 0:
            is_known[support[slot]] = 0
    return last


cdef double _sum_blocks(const Prob[::1] probs, const int32_t[::1] support, cpp_vector[char]& is_known,
                        cpp_vector[double]& sums) noexcept nogil:
    """The probability of the tokens that are not known; by block in `sums`."""
    cdef Py_ssize_t size = probs.shape[0], block, slot, first
    cdef double total = 0.0
    for block in range(<Py_ssize_t> sums.size()):
        first = block * BLOCK_SIZE
        sums[block] = sum_of(&probs[first], min(<Py_ssize_t> BLOCK_SIZE, size - first))
    for slot in range(support.shape[0]):
        if support[slot] >= 0:
            block = support[slot] // BLOCK_SIZE
            sums[block] = 0.0
            for first in range(block * BLOCK_SIZE, min(size, (block + 1) * BLOCK_SIZE)):
                sums[block] += 0.0 if is_known[first] else <double> probs[first]
    for block in range(<Py_ssize_t> sums.size()):
        total += sums[block]
    return total


cdef int64_t _find(const Prob[::1] probs, double scale, double point, cpp_vector[char]& is_known,
                   cpp_vector[double]& sums, int64_t last) noexcept nogil:
    """The first unknown token whose cumulated weight exceeds `point`, or the last one with a weight, or `last`."""
    cdef Py_ssize_t block, chosen = -1, token
    cdef double weight
    for block in range(<Py_ssize_t> sums.size()):
        weight = scale * sums[block]
        if weight > 0:
            if chosen >= 0:
                point -= scale * sums[chosen]
            chosen = block
            if point < weight:
                break
    if chosen < 0:
        return last
    for token in range(chosen * BLOCK_SIZE, min(probs.shape[0], <Py_ssize_t> (chosen + 1) * BLOCK_SIZE)):
        weight = 0.0 if is_known[token] else scale * probs[token]
        if weight > 0:
            last = token
            point -= weight
            if point < 0:
                break
    return last


def gained(
    accepted,  # B arrays int32: row-local nodes that are kept, root excluded
    const int32_t[::1] token_ids not None,  # [M] of the batch
    const int32_t[::1] offsets not None,  # [B + 1]
    next_tokens,  # [B] int64
):
    """B lists: tokens of the nodes that are kept, the next token last; None for nodes that their rows do not have."""
    cdef Py_ssize_t row
    cdef int64_t node
    if len(accepted) + 1 > offsets.shape[0]:
        return None
    rows = []
    for row, (path, next_token) in enumerate(zip(accepted, next_tokens.tolist(), strict=True)):
        tokens = []
        for node in path if type(path) is list else path.tolist():
            if not 0 < node < offsets[row + 1] - offsets[row]:
                return None
            tokens.append(token_ids[offsets[row] + node])
        tokens.append(next_token)
        rows.append(tokens)
    return rows
