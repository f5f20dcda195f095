"""The checks of a drafter's answer in one pass; `stand.drafters.check` names what is wrong."""

from libc.math cimport fabs
from libc.stdint cimport int32_t


def is_sound(
    const int32_t[::1] token_ids not None,  # [M]
    const int32_t[::1] parents not None,  # [M] row-local, -1 at roots
    const int32_t[::1] offsets not None,  # [B + 1]
    const int32_t[:, :] support_ids not None,  # [M, S]
    const float[:, :] law not None,  # [M, S]
    histories,  # B arrays int32, the pending token last
    Py_ssize_t vocabulary_size,
    double tolerance,
):
    """Whether every root is its row's pending token, every id is in the vocabulary, and every child's law sums to 1."""
    cdef Py_ssize_t node, slot, row = 0
    cdef double total
    for history in histories:
        if token_ids[offsets[row]] != history[-1]:
            return False
        row += 1
    for node in range(token_ids.shape[0]):
        if not 0 <= token_ids[node] < vocabulary_size:
            return False
        total = 0.0
        for slot in range(support_ids.shape[1]):
            if support_ids[node, slot] >= vocabulary_size:
                return False
            total += law[node, slot]
        if parents[node] >= 0 and not fabs(total - 1.0) <= tolerance:
            return False
    return True
