"""What a step asks of every row, gathered in one pass."""

from libc.stdint cimport int64_t

import numpy as np


def row_columns(rows):
    """[6, B] int64: of each `Row` its index, prompt word, steps, problem, tokens in the cache, and how deep a draft may be of use."""
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
