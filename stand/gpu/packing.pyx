"""Fills the arrays of a packed step from its drafts in one pass, without Python per node."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memset

import numpy as np


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


def list_work(
    const int32_t[::1] offsets not None,  # [B + 1]
    const int64_t[::1] lengths not None,  # [B] committed tokens per row
    const int64_t[::1] cache_rows not None,  # [B]
    int64_t tile_tokens,
    int64_t split_length,
):
    """(items [I, 8], num_splits [M]), int32: see `stand.gpu.work_list.WorkList`, which checks the arguments."""
    cdef Py_ssize_t num_rows = lengths.shape[0], row, item = 0, count = 0
    cdef int64_t tokens, tile, split, splits, first
    for row in range(num_rows):
        tokens = offsets[row + 1] - offsets[row]
        count += _parts(tokens, tile_tokens) * max(_parts(lengths[row], split_length), 1)
    table = np.empty((count, 8), dtype=np.int32)
    numbers = np.empty(offsets[num_rows], dtype=np.int32)
    cdef int32_t[:, ::1] items = table
    cdef int32_t[::1] num_splits = numbers
    for row in range(num_rows):
        tokens, first = offsets[row + 1] - offsets[row], offsets[row]
        splits = max(_parts(lengths[row], split_length), 1)
        num_splits[first : first + tokens] = <int32_t>splits
        for split in range(splits):
            for tile in range(_parts(tokens, tile_tokens)):
                items[item, 0] = <int32_t>first
                items[item, 1] = <int32_t>(first + tile * tile_tokens)
                items[item, 2] = <int32_t>min(tokens - tile * tile_tokens, tile_tokens)
                items[item, 3] = <int32_t>cache_rows[row]
                items[item, 4] = <int32_t>lengths[row]
                items[item, 5] = <int32_t>(split * split_length)
                items[item, 6] = <int32_t>((split + 1) * split_length)
                if split == splits - 1:  # the row's own tokens too, up to the last that the tile can see
                    items[item, 6] = <int32_t>(lengths[row] + tile * tile_tokens) + items[item, 2]
                items[item, 7] = <int32_t>split
                item += 1
    return table, numbers


cdef inline int64_t _parts(int64_t whole, int64_t part) noexcept:
    """How many parts cover the whole."""
    return (whole + part - 1) // part


def kept_paths(
    const int64_t[::1] stops not None,  # [B] packed node where each row stops
    const int32_t[::1] parents not None,  # [M] row-local, -1 at roots
    const int32_t[::1] offsets not None,  # [B + 1]
) -> list:
    """B arrays int32: the row-local nodes from below the root down to each stop, as `Verdicts.accepted` has them."""
    cdef Py_ssize_t row, place, first, end = 0
    cdef int32_t node
    nodes = np.empty(parents.shape[0], dtype=np.int32)  # a path has fewer nodes than its row
    bounds = []
    cdef int32_t[::1] kept = nodes
    for row in range(stops.shape[0]):
        node, first = <int32_t>(stops[row] - offsets[row]), end
        while node > 0:
            node = parents[offsets[row] + node]
            end += 1
        node = <int32_t>(stops[row] - offsets[row])
        for place in range(end - 1, first - 1, -1):
            kept[place] = node
            node = parents[offsets[row] + node]
        bounds.append((first, end))
    return [nodes[start:stop] for start, stop in bounds]
