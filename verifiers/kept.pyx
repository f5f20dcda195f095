"""What the rows of a step gain, without Python per node."""

from libc.stdint cimport int32_t

import numpy as np


def gained(
    accepted,  # B arrays int32: row-local nodes that are kept, root excluded
    batch_tokens,  # [M] int32
    batch_offsets,  # [B + 1]
    next_tokens,  # [B] int64
):
    """B lists: the tokens of the nodes that are kept, the next token last."""
    cdef const int32_t[::1] token_ids = np.ascontiguousarray(batch_tokens, dtype=np.int32)
    cdef const int32_t[::1] offsets = np.ascontiguousarray(batch_offsets, dtype=np.int32)
    cdef const int32_t[::1] nodes = np.ascontiguousarray(np.concatenate(accepted), dtype=np.int32)
    cdef Py_ssize_t row, end, place = 0
    rows = []
    for row, (path, next_token) in enumerate(zip(accepted, next_tokens.tolist(), strict=True)):
        end = place + len(path)
        tokens = [token_ids[offsets[row] + nodes[kept]] for kept in range(place, end)]
        tokens.append(next_token)
        rows.append(tokens)
        place = end
    return rows
