"""What every step asks of all its rows and of all nodes of its drafts, each in one pass."""

from libc.math cimport fabs
from libc.stdint cimport int32_t, int64_t, uint32_t

import numpy as np


def row_columns(rows):
    """[6, B] int64: of each `Row` its index, prompt word, steps, problem, tokens in the cache, and how deep a draft may
    be of use."""
    cdef Py_ssize_t place = 0
    columns = np.empty((6, len(rows)), dtype=np.int64)
    cdef int64_t[:, ::1] numbers = columns
    for row in rows:
        numbers[0, place] = row.index
        numbers[1, place] = row.prompt_word
        numbers[2, place] = row.num_steps
        numbers[3, place] = row.problem
        numbers[4, place] = row.num_cached
        numbers[5, place] = row.num_remaining - 1
        place += 1
    return columns


cdef bint is_new(int32_t* seen, int64_t* seen_at, Py_ssize_t num_places, Py_ssize_t node, int32_t token) noexcept:
    """Whether this is the first time that the node's support has the token; places: a power of two, more than tokens."""
    cdef Py_ssize_t place = (<uint32_t>token * <uint32_t>2654435761) & (num_places - 1)
    while seen_at[place] == node:
        if seen[place] == token:
            return False
        place = (place + 1) & (num_places - 1)
    seen[place], seen_at[place] = token, node
    return True


def is_sound(
    const int32_t[::1] token_ids not None,  # [M]
    const int32_t[::1] parents not None,  # [M] row-local, -1 at roots
    const int32_t[::1] offsets not None,  # [B + 1]
    const int32_t[:, ::1] support_ids not None,  # [M, S]
    const float[:, ::1] law not None,  # [M, S]
    histories,  # B arrays int32, the pending token last
    Py_ssize_t vocabulary_size,
    double tolerance,
):
    """Whether every root is its row's pending token, every id is in the vocabulary, no support names one twice, parents
    come before their children, and every child's law sums to 1, is nowhere negative, has no mass on padding and gives
    the child's own token mass."""
    cdef Py_ssize_t num_nodes = token_ids.shape[0], width = support_ids.shape[1], row = 0, first, node, slot, above
    cdef Py_ssize_t num_places = 2
    while num_places < 2 * width:
        num_places *= 2
    cdef int32_t[::1] seen = np.empty(num_places, dtype=np.int32)  # ids of one support, by a hash
    cdef int64_t[::1] seen_at = np.full(num_places, -1, dtype=np.int64)  # of which node
    cdef double total, mass
    cdef bint has_own
    if not parents.shape[0] == support_ids.shape[0] == law.shape[0] == num_nodes or law.shape[1] != width:
        return False
    if offsets.shape[0] != len(histories) + 1 or offsets[0] != 0 or offsets[offsets.shape[0] - 1] != num_nodes:
        return False
    for history in histories:
        first = offsets[row]
        row += 1
        if not first < offsets[row] <= num_nodes or parents[first] != -1 or token_ids[first] != history[len(history) - 1]:
            return False
        for node in range(first, offsets[row]):
            if not 0 <= token_ids[node] < vocabulary_size:
                return False
            for slot in range(width):
                if support_ids[node, slot] >= vocabulary_size:
                    return False
                if support_ids[node, slot] >= 0 and not is_new(&seen[0], &seen_at[0], num_places, node,
                                                               support_ids[node, slot]):
                    return False
            if node == first:
                continue
            if not 0 <= parents[node] < node - first:
                return False
            above = first + parents[node]
            total = 0.0
            has_own = False
            for slot in range(width):
                mass = law[node, slot]
                if not mass >= 0.0 or (mass > 0.0 and support_ids[above, slot] < 0):
                    return False
                total += mass
                if support_ids[above, slot] == token_ids[node] and mass > 0.0:
                    has_own = True
            if not (has_own and fabs(total - 1.0) <= tolerance):
                return False
    return True
