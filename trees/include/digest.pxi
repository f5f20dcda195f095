# The digest of what a lookup has learned, and where a call's own random numbers start: see noise.h.

cdef extern from "include/noise.h" namespace "stand" nogil:
    uint64_t extended_digest(uint64_t digest, const int32_t* token_ids, int64_t num_tokens)
    uint64_t start_of_call(uint64_t& digest, bint learns)
