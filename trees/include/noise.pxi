"""Uniforms by their keys; see `stand.trees.noise`."""

from libc.stdint cimport int32_t, int64_t, uint64_t

import numpy as np

from stand.trees.arguments import int64_array, whole

cdef extern from "include/noise.h" namespace "stand" nogil:
    const uint64_t DRAFT_STREAM
    const uint64_t ACCEPT_STREAM
    const uint64_t RESAMPLE_STREAM
    const uint64_t TARGET_STREAM
    const uint64_t C_GOLDEN_GAMMA "stand::GOLDEN_GAMMA"
    const uint64_t C_FIRST_FACTOR "stand::FIRST_FACTOR"
    const uint64_t C_SECOND_FACTOR "stand::SECOND_FACTOR"
    uint64_t stream_key(uint64_t seed, uint64_t stream)
    uint64_t step_key(uint64_t stream_key, uint64_t row, uint64_t step)
    double uniform(uint64_t step_key, uint64_t node, uint64_t slot)

DRAFT = DRAFT_STREAM
ACCEPT = ACCEPT_STREAM
RESAMPLE = RESAMPLE_STREAM
TARGET = TARGET_STREAM

# Of SplitMix64, for generators that run on other devices.
GOLDEN_GAMMA = C_GOLDEN_GAMMA
FIRST_FACTOR = C_FIRST_FACTOR
SECOND_FACTOR = C_SECOND_FACTOR

cdef enum:
    WORD_BITS = 32  # of rows, steps, nodes and slots


def node_uniforms(
    seed,
    stream,
    row_numbers,  # [B]
    step_numbers,  # [B]
    row_offsets,  # [B + 1] first packed node of each row, then their number M
    node_depths=None,  # [M]
    *,
    out=None,  # float64 [>= M], written to and returned
):
    """float64[M]: per packed node `uniforms` of its row, its row's step and its number in the row; with depths, of
    the row, step + depth and 0.

    Ranges as in `uniforms`. Raises ValueError otherwise.
    """
    check_stream(seed, stream)
    cdef const int64_t[::1] rows = np.ascontiguousarray(row_numbers, dtype=np.int64)
    cdef const int64_t[::1] steps = np.ascontiguousarray(step_numbers, dtype=np.int64)
    cdef const int32_t[::1] offsets = np.ascontiguousarray(row_offsets, dtype=np.int32)
    cdef const int32_t[::1] depths = None if node_depths is None else np.ascontiguousarray(node_depths, dtype=np.int32)
    cdef Py_ssize_t row, node, num_rows = offsets.shape[0] - 1
    cdef uint64_t key = stream_key(seed, stream), row_key, step, bits = 0
    _check_offsets(offsets, rows, steps)
    if out is None:
        out = np.empty(offsets[num_rows], dtype=np.float64)
    cdef double[::1] numbers = out
    if numbers.shape[0] < offsets[num_rows] or (depths is not None and depths.shape[0] < offsets[num_rows]):
        raise ValueError(f"out and node_depths must hold {offsets[num_rows]} nodes, got less; give longer arrays")
    for row in range(num_rows):
        row_key = step_key(key, rows[row], steps[row])
        bits |= <uint64_t> rows[row] | <uint64_t> steps[row]
        for node in range(offsets[row], offsets[row + 1]):
            if depths is None:
                numbers[node] = uniform(row_key, node - offsets[row], 0)
            else:
                step = <uint64_t> (steps[row] + depths[node])
                bits |= step
                numbers[node] = uniform(step_key(key, rows[row], step), 0, 0)
    if bits >> WORD_BITS:
        raise ValueError("rows and steps must be in [0, 2**32), got others; number rows and steps from 0")
    return out


def fill_tests(
    seed,
    row_numbers,  # [B]
    step_numbers,  # [B]
    row_offsets,  # [B + 1]
    double[::1] accept not None,  # [>= M]
    double[::1] resample not None,  # [>= B]
):
    """The uniforms of a step's tests in one pass: ACCEPT's `node_uniforms`, and RESAMPLE's of each row's node 0.

    Ranges as in `uniforms`. Raises ValueError otherwise, and where they do not fit.
    """
    check_stream(seed, 0)
    cdef const int64_t[::1] rows = np.ascontiguousarray(row_numbers, dtype=np.int64)
    cdef const int64_t[::1] steps = np.ascontiguousarray(step_numbers, dtype=np.int64)
    cdef const int32_t[::1] offsets = np.ascontiguousarray(row_offsets, dtype=np.int32)
    cdef Py_ssize_t row, node, num_rows = offsets.shape[0] - 1
    cdef uint64_t accept_key = stream_key(seed, ACCEPT_STREAM), resample_key = stream_key(seed, RESAMPLE_STREAM)
    cdef uint64_t key, bits = 0
    _check_offsets(offsets, rows, steps)
    if accept.shape[0] < offsets[num_rows] or resample.shape[0] < num_rows:
        raise ValueError(
            f"accept and resample must hold {offsets[num_rows]} nodes and {num_rows} rows, got {len(accept)} and "
            f"{len(resample)}; give longer arrays"
        )
    for row in range(num_rows):
        bits |= <uint64_t> rows[row] | <uint64_t> steps[row]
        key = step_key(accept_key, rows[row], steps[row])
        for node in range(offsets[row], offsets[row + 1]):
            accept[node] = uniform(key, node - offsets[row], 0)
        resample[row] = uniform(step_key(resample_key, rows[row], steps[row]), 0, 0)
    if bits >> WORD_BITS:
        raise ValueError("rows and steps must be in [0, 2**32), got others; number rows and steps from 0")


def step_keys(seed, stream, rows, steps):
    """uint64[n]: per (row, step) the key that the node and the slot are mixed into.

    seed and stream are in [0, 2**64); rows [n] and steps [n] in [0, 2**32). Raises ValueError otherwise.
    """
    check_stream(seed, stream)
    cdef const int64_t[::1] row_numbers = np.atleast_1d(int64_array(rows, "rows"))
    cdef const int64_t[::1] step_numbers = np.atleast_1d(int64_array(steps, "steps"))
    cdef Py_ssize_t num_keys = row_numbers.shape[0], i
    if step_numbers.shape[0] != num_keys:
        raise ValueError(
            f"rows and steps must be of one length, got {num_keys} and {step_numbers.shape[0]}; give each row its step"
        )
    keys = np.empty(num_keys, dtype=np.uint64)
    cdef uint64_t[::1] key_view = keys
    cdef uint64_t words = 0, key = stream_key(seed, stream)
    for i in range(num_keys):
        words |= <uint64_t> row_numbers[i] | <uint64_t> step_numbers[i]
        key_view[i] = step_key(key, row_numbers[i], step_numbers[i])
    if words >> WORD_BITS:
        raise ValueError("rows and steps must be in [0, 2**32), got others; number them from 0")
    return keys


cdef int _check_offsets(const int32_t[::1] offsets, const int64_t[::1] rows, const int64_t[::1] steps) except -1:
    """ValueError where they are not those of as many rows, or do not ascend from 0."""
    cdef Py_ssize_t row, num_rows = offsets.shape[0] - 1
    if rows.shape[0] != num_rows or steps.shape[0] != num_rows:
        raise ValueError(
            f"rows and steps must be [{num_rows}] as the offsets say, got {len(rows)} and {len(steps)}; give each row "
            "its own"
        )
    cdef bint sound = offsets[0] == 0
    for row in range(num_rows):
        sound = sound and offsets[row] <= offsets[row + 1]
    if not sound:
        raise ValueError("offsets must ascend from 0, got others; pass those of a DraftBatch")
    return 0


def check_stream(seed, stream):
    """Raises ValueError."""
    if not (0 <= whole(seed, "seed") < 2**64 and 0 <= whole(stream, "stream") < 2**64):
        raise ValueError(f"seed and stream must be in [0, 2**64), got {seed} and {stream}; seeds have 64 bits")


def fill_uniforms(
    uint64_t seed, uint64_t stream, const int64_t[:, ::1] words not None, uint64_t slot, double[::1] out not None
):
    """out[i] = the uniform of (seed, stream, *words[:, i], slot); False where a word is out of range."""
    cdef Py_ssize_t i
    cdef uint64_t key = stream_key(seed, stream), bits = 0
    for i in range(out.shape[0]):
        bits |= <uint64_t> words[0, i] | <uint64_t> words[1, i] | <uint64_t> words[2, i]
        out[i] = uniform(step_key(key, words[0, i], words[1, i]), words[2, i], slot)
    return bits >> WORD_BITS == 0
