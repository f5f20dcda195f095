"""Drafts and texts in the layouts of serving engines; the work on drafts is done in layout.h."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t
from libcpp.vector cimport vector as cpp_vector

import numpy as np

cnp.import_array()

from stand.trees.arguments import whole

cdef extern from "layouts/layout.h" namespace "stand" nogil:
    cdef cppclass DraftView:
        const int32_t* token_ids
        const int32_t* parents
        const int32_t* offsets
        const float* path_probabilities
        int64_t num_rows

    cdef cppclass PathSums:
        pass

    void best_path(
        const DraftView& drafts, int64_t row, int32_t most, PathSums& scratch, cpp_vector[int32_t]& path
    ) except +
    int64_t first_too_large(const DraftView& drafts, int64_t num_nodes)
    void pad_with_ancestors[Flag](const DraftView& drafts, int64_t num_nodes, int32_t pad, int32_t* token_ids,
                                  Flag* masks)

cdef enum:
    MOST = 2147483647


cdef DraftView view_of(batch) except *:
    """The batch, checked; valid as long as it lives."""
    cdef DraftView view
    cdef const float[::1] probabilities
    check_batch(batch)
    cdef cnp.ndarray token_ids = batch.token_ids, parents = batch.parents, offsets = batch.offsets
    view.num_rows = cnp.PyArray_DIM(offsets, 0) - 1
    view.path_probabilities = NULL
    if view.num_rows > 0:
        view.token_ids = <const int32_t*> cnp.PyArray_DATA(token_ids)
        view.parents = <const int32_t*> cnp.PyArray_DATA(parents)
        view.offsets = <const int32_t*> cnp.PyArray_DATA(offsets)
        if batch.path_probabilities is not None:
            probabilities = batch.path_probabilities
            if probabilities.shape[0] != cnp.PyArray_DIM(token_ids, 0):
                raise ValueError("path_probabilities must hold one number per node, got others; see batch.check()")
            view.path_probabilities = &probabilities[0]
    return view


def chains(batch, num_tokens):
    """See `DraftBatch.chains`."""
    cdef DraftView view = view_of(batch)
    cdef PathSums scratch
    cdef cpp_vector[int32_t] path
    cdef int64_t row
    cdef int32_t most
    if whole(num_tokens, "num_tokens") < 0:
        raise ValueError(f"num_tokens must be at least 0, got {num_tokens}; 0 is no token")
    most = min(num_tokens, MOST)
    found = []
    for row in range(view.num_rows):
        best_path(view, row, most, scratch, path)
        found.append([path[i] for i in range(<Py_ssize_t> path.size())])
    return found


def ancestor_masks(batch, num_nodes, pad_id, out):
    """See `DraftBatch.ancestor_masks`."""
    cdef DraftView view = view_of(batch)
    cdef int64_t size = whole(num_nodes, "num_nodes"), too_large
    cdef int32_t pad = pad_id
    if not 1 <= size <= 4096 or pad < 0:
        raise ValueError(
            f"num_nodes must be in [1, 4096] and pad_id at least 0, got {num_nodes} and {pad_id}; pads are a token"
        )
    too_large = first_too_large(view, size)
    if too_large >= 0:
        raise ValueError(
            f"no draft may have more than num_nodes={num_nodes} nodes, got {batch.sizes[too_large]} in row "
            f"{too_large}; draft with max_nodes={num_nodes - 1}"
        )
    tokens = np.empty((view.num_rows, size), dtype=np.int32)
    masks = np.empty((view.num_rows, size, size), dtype=np.bool_) if out is None else out
    if masks.shape != (view.num_rows, size, size) or not masks.flags.carray or (
        masks.dtype != (np.bool_ if out is None else np.int64)
    ):
        raise ValueError(
            f"out must be a writable C-contiguous int64 array of shape {(view.num_rows, size, size)}, got "
            f"{masks.dtype} of shape {masks.shape}; leave it out for a new one"
        )
    cdef int32_t* first = <int32_t*> cnp.PyArray_DATA(tokens)
    if view.num_rows > 0 and out is None:
        pad_with_ancestors(view, size, pad, first, <uint8_t*> cnp.PyArray_DATA(masks))
    elif view.num_rows > 0:
        pad_with_ancestors(view, size, pad, first, <int64_t*> cnp.PyArray_DATA(masks))
    return tokens, masks


def left_aligned(texts):
    """(int32[B, longest], lengths int64[B]): lists of token ids at the left of the rows of one array, then zeros."""
    cdef Py_ssize_t num_texts = len(texts), text, i, longest = 0
    cdef cnp.npy_intp[2] shape
    cdef list numbers
    lengths = np.empty(num_texts, dtype=np.int64)
    cdef int64_t* sizes = <int64_t*> cnp.PyArray_DATA(lengths)
    for text in range(num_texts):
        sizes[text] = len(texts[text])
        longest = max(longest, sizes[text])
    shape[0], shape[1] = num_texts, longest
    tokens = cnp.PyArray_ZEROS(2, shape, cnp.NPY_INT32, 0)
    cdef int32_t* row = <int32_t*> cnp.PyArray_DATA(tokens)
    try:
        for text in range(num_texts):
            numbers = list(texts[text]) if type(texts[text]) is not list else texts[text]
            for i in range(min(sizes[text], len(numbers))):
                row[i] = numbers[i]
            row += longest
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"texts must hold whole numbers below 2**31, got {error} in text {text}; token ids are int32"
        ) from None
    return tokens, lengths
