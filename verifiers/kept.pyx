"""What the rows of a step gain, without Python per node."""

from libc.stdint cimport int32_t, int64_t

import numpy as np

cdef object NOTHING = np.zeros(0, dtype=np.int64)


def gained(
    accepted,  # B arrays int32: row-local nodes that are kept, root excluded
    batch_tokens,  # [M] int32
    batch_offsets,  # [B + 1]
    next_tokens,  # [B] int64
):
    """(B arrays int64: the packed nodes that are kept; B lists: their tokens, the next token last)."""
    cdef const int32_t[::1] token_ids = np.ascontiguousarray(batch_tokens, dtype=np.int32)
    cdef const int32_t[::1] offsets = np.ascontiguousarray(batch_offsets, dtype=np.int32)
    cdef const int32_t[:] path
    cdef int64_t[::1] packed
    cdef Py_ssize_t row, place
    all_nodes, all_tokens = [], []
    for row, (kept, next_token) in enumerate(zip(accepted, next_tokens.tolist(), strict=True)):
        tokens = []
        nodes = NOTHING
        if len(kept):
            path = np.asarray(kept, dtype=np.int32)
            nodes = np.empty(path.shape[0], dtype=np.int64)
            packed = nodes
            for place in range(path.shape[0]):
                packed[place] = offsets[row] + path[place]
                tokens.append(token_ids[packed[place]])
        tokens.append(next_token)
        all_nodes.append(nodes)
        all_tokens.append(tokens)
    return all_nodes, all_tokens
