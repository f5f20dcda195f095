"""Drafts in the layouts of serving engines; the work is done in layout.h."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t
from libcpp.vector cimport vector

import numpy as np

cnp.import_array()

from stand.trees.arguments import check_batch

cdef extern from "layout.h" namespace "stand" nogil:
    cdef cppclass DraftView:
        const int32_t* token_ids
        const int32_t* parents
        const int32_t* offsets
        const float* path_probabilities
        int64_t num_rows

    void best_path(const DraftView& drafts, int64_t row, int32_t most, vector[int32_t]& path) except +
    int64_t first_too_large(const DraftView& drafts, int64_t num_nodes)
    void pad_with_ancestors(const DraftView& drafts, int64_t num_nodes, int32_t pad, int32_t* token_ids, uint8_t* masks)

cdef enum:
    MOST = 2147483647


cdef DraftView view_of(batch) except *:
    """The batch, checked; valid as long as it lives."""
    cdef DraftView view
    cdef const int32_t[::1] token_ids = batch.token_ids, parents = batch.parents, offsets = batch.offsets
    cdef const float[::1] probabilities
    check_batch(batch)
    view.num_rows = offsets.shape[0] - 1
    view.path_probabilities = NULL
    if view.num_rows > 0:
        view.token_ids, view.parents, view.offsets = &token_ids[0], &parents[0], &offsets[0]
        if batch.path_probabilities is not None:
            probabilities = batch.path_probabilities
            view.path_probabilities = &probabilities[0]
    return view


def chains(batch, num_tokens):
    """See `DraftBatch.chains`."""
    cdef DraftView view = view_of(batch)
    cdef vector[int32_t] path
    cdef int64_t row
    cdef int32_t most
    if num_tokens < 0:
        raise ValueError(f"num_tokens must be at least 0, got {num_tokens}")
    most = min(num_tokens, MOST)
    found = []
    for row in range(view.num_rows):
        best_path(view, row, most, path)
        found.append([path[i] for i in range(<Py_ssize_t> path.size())])
    return found


def ancestor_masks(batch, num_nodes, pad_id):
    """See `DraftBatch.ancestor_masks`."""
    cdef DraftView view = view_of(batch)
    cdef int64_t size = num_nodes, too_large
    cdef int32_t pad = pad_id
    if not 1 <= num_nodes <= 4096 or pad < 0:
        raise ValueError(f"num_nodes must be in [1, 4096] and pad_id at least 0, got {num_nodes} and {pad_id}")
    too_large = first_too_large(view, size)
    if too_large >= 0:
        raise ValueError(
            f"no draft may have more than num_nodes={num_nodes} nodes, got {batch.sizes[too_large]} in row {too_large}; "
            f"draft with max_nodes={num_nodes - 1}"
        )
    tokens = np.empty((view.num_rows, size), dtype=np.int32)
    masks = np.zeros((view.num_rows, size, size), dtype=np.bool_)
    if view.num_rows > 0:
        pad_with_ancestors(view, size, pad, <int32_t*> cnp.PyArray_DATA(tokens), <uint8_t*> cnp.PyArray_DATA(masks))
    return tokens, masks
