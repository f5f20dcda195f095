"""Checks of arrays that lookups are given, entry by entry; for the errors see `stand.trees.arguments`."""

from libc.stdint cimport int32_t, int64_t
from libcpp cimport bool as bool_t

import numpy as np

from stand.trees.arguments import check_is_batch, int32_array, vector

LARGEST_PROBABILITY = 1.001  # room for the rounding of a softmax in low precision


def tokens_of(values, name):
    """int32[:], none negative."""
    cdef const int32_t[::1] tokens = vector(values, name)
    cdef Py_ssize_t i
    for i in range(tokens.shape[0]):
        if tokens[i] < 0:
            raise ValueError(f"{name} must not hold negative token ids, got {tokens[i]}; pass tokens without padding")
    return tokens.base


def checked_laws(top_ids, top_probs, num_laws):
    """(int32[num_laws, W], float32[num_laws, W]): sound entries of laws."""
    cdef const int32_t[:, ::1] ids
    cdef const float[:, ::1] probs
    cdef float most = LARGEST_PROBABILITY
    cdef Py_ssize_t law, i
    id_array, prob_array = int32_array(top_ids, "top_ids"), np.ascontiguousarray(top_probs, dtype=np.float32)
    shapes = id_array.shape, prob_array.shape
    if shapes[0] != shapes[1] or id_array.ndim != 2 or len(id_array) != num_laws or id_array.shape[1] == 0:
        raise ValueError(
            f"top_ids and top_probs must be two [{num_laws}, W] arrays with W > 0, got {shapes[0]} and {shapes[1]}; "
            "give each node a law"
        )
    ids, probs = id_array, prob_array
    for law in range(ids.shape[0]):
        for i in range(ids.shape[1]):
            if not (ids[law, i] >= -1 and 0.0 <= probs[law, i] <= most):
                raise ValueError(
                    f"top_ids must be >= -1 and top_probs in [0, 1], got {ids[law, i]} and {probs[law, i]:g}; "
                    "pad with id -1 and probability 0"
                )
    return id_array, prob_array


def check_batch(batch):
    """ValueError where nodes, parents and offsets of a batch are unsound."""
    check_is_batch(batch)
    cdef const int32_t[::1] token_ids = batch.token_ids, parents = batch.parents, offsets = batch.offsets
    cdef int64_t num_rows = offsets.shape[0] - 1, row, node
    cdef bool_t sound = parents.shape[0] == token_ids.shape[0] and num_rows >= 0 and offsets[0] == 0
    sound = sound and offsets[num_rows] == token_ids.shape[0]
    for row in range(num_rows if sound else 0):
        sound = sound and offsets[row] < offsets[row + 1] <= token_ids.shape[0]
        sound = sound and token_ids[offsets[row]] >= 0 and parents[offsets[row]] == -1
        for node in range(offsets[row] + 1, offsets[row + 1] if sound else 0):
            sound = sound and token_ids[node] >= 0 and 0 <= parents[node] < node - offsets[row]
    if not sound:
        raise ValueError(
            "batch must be a sound DraftBatch (tokens >= 0, parents before children), got another; see batch.check()"
        )


def checked_estimates(batch):
    """float32[M], the batch's path_estimates."""
    check_is_batch(batch)
    estimates = batch.path_estimates
    if estimates is None:
        raise ValueError("batch must have path_estimates, got None; pass a draft of a BlendedLookup")
    cdef const float[::1] values = np.ascontiguousarray(estimates, dtype=np.float32)
    cdef float most = LARGEST_PROBABILITY
    cdef bool_t sound = values.shape[0] == batch.num_nodes
    cdef Py_ssize_t node
    for node in range(values.shape[0]):
        sound = sound and 0.0 <= values[node] <= most
    if not sound:
        raise ValueError(
            f"path_estimates must be {batch.num_nodes} numbers in [0, 1], got {estimates}; pass a draft as it was made"
        )
    return values.base
