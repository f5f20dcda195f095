"""Fills the arrays of a packed step from its drafts in one pass, without Python per node."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memset


def pack(
    const int32_t[::1] token_ids not None,  # [m] the drafts, m <= M
    const int32_t[::1] parents not None,  # [m] row-local, -1 at roots
    const int32_t[::1] depths not None,  # [m]
    const int32_t[::1] offsets not None,  # [b + 1], b <= B
    const int64_t[::1] lengths not None,  # [b] committed keys of each row
    const int64_t[::1] cache_rows not None,  # [b]
    int64_t room,  # slots of a cache row; the last one of row 0 takes what padding writes
    *,
    int64_t[::1] out_token_ids not None,  # [M]
    int64_t[::1] out_positions not None,  # [M]
    int64_t[::1] out_slots not None,  # [M] cache row * room + slot
    int64_t[:, ::1] out_ancestors not None,  # [M, W] bit j of a row: local node j is an ancestor, or itself
    int64_t[::1] out_parents not None,  # [M] packed, roots and padding point to themselves
    int64_t[::1] out_firsts not None,  # [M] packed root of the token's row
    int64_t[::1] out_row_of not None,  # [M] row, B at padding
    int64_t[::1] out_depths not None,  # [M]
    int64_t[::1] out_follows not None,  # [M] 1 where a walk may step to the node: a child, first of its token
    int32_t[::1] out_offsets not None,  # [B + 1]
    int64_t[::1] out_lengths not None,  # [B]
    int64_t[::1] out_cache_rows not None,  # [B]
) -> None:
    """Pack b rows with m nodes into arrays made for B rows and M nodes; what is left over becomes padding.

    Raises ValueError when the drafts do not fit: more rows or nodes than the arrays hold, a row of more nodes than
    W * 64, or a slot beyond the room.
    """
    cdef Py_ssize_t num_tokens = token_ids.shape[0], capacity = out_token_ids.shape[0]
    cdef Py_ssize_t num_rows = lengths.shape[0], row_capacity = out_lengths.shape[0]
    cdef Py_ssize_t num_words = out_ancestors.shape[1], row, node, packed, first, parent, word, twin
    cdef int64_t length, last = room - 1
    cdef uint64_t bit
    if num_tokens > capacity or num_rows > row_capacity:
        raise ValueError(
            f"a packed step made for {capacity} tokens of {row_capacity} rows must hold its drafts, got {num_tokens} "
            f"tokens of {num_rows} rows; take a larger step size"
        )
    for row in range(num_rows):
        if offsets[row + 1] - offsets[row] > num_words * 64:
            raise ValueError(
                f"a row's draft must have at most {num_words * 64} nodes, got {offsets[row + 1] - offsets[row]}; "
                "lower the budget"
            )
        if lengths[row] + offsets[row + 1] - offsets[row] > last:
            raise ValueError(
                f"a row must fit into the cache's room of {last} slots, got {lengths[row]} committed tokens and "
                f"{offsets[row + 1] - offsets[row]} nodes; grow the cache first"
            )
    memset(&out_ancestors[0, 0], 0, capacity * num_words * sizeof(int64_t))
    for row in range(num_rows):
        first, length = offsets[row], lengths[row]
        out_lengths[row], out_cache_rows[row] = length, cache_rows[row]
        out_offsets[row] = offsets[row]
        for packed in range(first, offsets[row + 1]):
            node = packed - first
            parent = packed if parents[packed] < 0 else first + parents[packed]
            out_token_ids[packed] = token_ids[packed]
            out_positions[packed] = length + depths[packed]
            out_slots[packed] = cache_rows[row] * room + length + node
            out_parents[packed] = parent
            out_firsts[packed] = first
            out_row_of[packed] = row
            out_depths[packed] = depths[packed]
            out_follows[packed] = node > 0
            for twin in range(parent + 1, packed):  # siblings of one token: the earliest is the one that is followed
                if parents[twin] == parents[packed] and token_ids[twin] == token_ids[packed]:
                    out_follows[packed] = 0
                    break
            for word in range(num_words):
                out_ancestors[packed, word] = out_ancestors[parent, word]
            bit = (<uint64_t>1) << (node & 63)
            out_ancestors[packed, node >> 6] = <int64_t>((<uint64_t>out_ancestors[packed, node >> 6]) | bit)
    for row in range(num_rows, row_capacity):
        out_lengths[row] = out_cache_rows[row] = 0
    for row in range(num_rows, row_capacity + 1):
        out_offsets[row] = <int32_t>num_tokens
    for packed in range(num_tokens, capacity):
        out_token_ids[packed] = out_positions[packed] = out_depths[packed] = out_follows[packed] = 0
        out_slots[packed] = last
        out_parents[packed] = out_firsts[packed] = packed
        out_row_of[packed] = row_capacity
