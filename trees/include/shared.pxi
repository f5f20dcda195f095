# What both lookups use of the C++ headers of this folder.

cdef extern from "include/sampling.h" namespace "stand" nogil:
    cdef enum class DraftKind(int32_t):
        deterministic

cdef extern from "include/window.h" namespace "stand" nogil:
    cdef cppclass StepView:
        const int32_t* token_ids
        const int32_t* parents
        const int32_t* offsets
        int64_t num_rows
        const int32_t* histories
        const int32_t* history_sizes
        int32_t history_limit
