"""The laws of a step on a CPU, compiled: temperature, top_k, top_p and min_p without a sort of the vocabulary.

The work is done in C++ (filters.h, block_passes.h) without the interpreter's lock; this file checks arguments.
"""

from libc.stdint cimport int32_t, int64_t

import numpy as np

from stand.argument_checks import check_filters

cdef extern from "filters.h" namespace "stand" nogil:
    cdef enum class C_Vectors "stand::Vectors":
        pass

    C_Vectors widest_vectors()

    cdef cppclass C_Filters "stand::Filters":
        float temperature
        int64_t top_k
        double top_p
        float min_p

    cdef cppclass C_FilterRows "stand::FilterRows":
        const float* scores
        int64_t num_rows
        int64_t size
        C_Filters filters
        C_Vectors vectors
        float* laws
        int64_t count
        int32_t* best_ids
        float* best_probabilities

    ctypedef void (*C_RunInThreads "stand::RunInThreads")(void (*)(void*), void*, unsigned, unsigned)

    void C_filter_rows "stand::filter_rows" (C_FilterRows& rows, int num_threads, C_RunInThreads in_threads) except +

# The instruction sets that this processor has, the widest last; the first alone where the environment has
# STAND_PORTABLE.
VECTORS = ("portable", "avx2", "avx512")[: <int>widest_vectors() + 1]


cdef extern from "../../trees/include/compact_wrappers.h":
    pass


def filter_laws(const float[:, ::1] scores not None, *, double temperature=1.0, int64_t top_k=0, double top_p=1.0,
                double min_p=0.0, int64_t count=0, vectors=None, int num_threads=1, Py_ssize_t in_threads=0):
    """(laws [M, V] float32, ids [M, count] int32, probabilities [M, count] float32) of scores [M, V].

    A law is the softmax of what transformers' warpers leave of scores / temperature: top_k (0: off) keeps what is not
    below the k-th best, ties with it included; top_p (1: off) takes tokens out from the worst on while they weigh no
    more than 1 - top_p together, of equal scores the lowest ids first (a stable ascending sort), and never the last;
    min_p (0: off) keeps what is not below min_p times the best.

    Sums and exponentials are rounded: a token may fall on the other side of a border that its cumulative mass is
    within 1e-6 of the whole from (top_p), or its probability within a factor of 1 + 1e-5 (min_p). Probabilities are
    within a factor of 1 + 1e-6 of the softmax of scores / temperature in float32; below exp(-87) times the best
    one's they are 0.

    ids, probabilities: the best `count` (at most V) tokens of each law, the most probable first; of equally probable
    ones those with higher scores, then with lower ids. They go on with tokens of probability 0 where fewer are kept.

    A row with NaN, or without a finite best score, is NaN throughout. `vectors`: one of VECTORS (None: the widest).
    `in_threads`: the address of GOMP_parallel (`stand.simd.threads.parallel_region`), or 0 for the calling thread
    alone. Results are equal to the bit with any of these. Raises ValueError for settings out of range.
    """
    cdef int64_t num_rows = scores.shape[0], size = scores.shape[1]
    cdef C_FilterRows rows
    check_filters(size, temperature, top_k, top_p, min_p, count, vectors, VECTORS)
    all_laws = np.empty((num_rows, size), dtype=np.float32)
    all_ids, all_probabilities = np.empty((num_rows, count), np.int32), np.empty((num_rows, count), np.float32)
    cdef float[:, ::1] laws = all_laws, probabilities = all_probabilities
    cdef int32_t[:, ::1] ids = all_ids
    if num_rows == 0:
        return all_laws, all_ids, all_probabilities
    rows.scores, rows.num_rows, rows.size, rows.laws = &scores[0, 0], num_rows, size, &laws[0, 0]
    rows.filters.temperature, rows.filters.top_k = temperature, top_k
    rows.filters.top_p, rows.filters.min_p = top_p, min_p
    rows.vectors = <C_Vectors><int>(widest_vectors() if vectors is None else VECTORS.index(vectors))
    rows.count = count
    rows.best_ids = <int32_t*>(&ids[0, 0] if count > 0 else NULL)
    rows.best_probabilities = <float*>(&probabilities[0, 0] if count > 0 else NULL)
    with nogil:
        C_filter_rows(rows, num_threads, <C_RunInThreads> in_threads)
    return all_laws, all_ids, all_probabilities
