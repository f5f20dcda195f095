# Grown drafts, and laws, as arrays of Python.

cdef object grown_batch(Growth& growth):
    """The grown nodes as a DraftBatch: parts of one array, because making many costs more than filling them."""
    cdef Py_ssize_t num_rows = growth.row_sizes.size(), row, num_nodes = 0
    cdef int32_t width = law_width(growth)
    for row in range(num_rows):
        num_nodes += growth.row_sizes[row]
    cdef Py_ssize_t num_cells = width * num_nodes
    cdef cnp.npy_intp size = num_rows + 1 + 6 * num_nodes + 2 * num_cells
    cdef cnp.ndarray numbers = cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT32)
    cdef int32_t* offsets = <int32_t*> cnp.PyArray_DATA(numbers)
    cdef DraftSink sink
    offsets[0] = 0
    for row in range(num_rows):
        offsets[row + 1] = offsets[row] + growth.row_sizes[row]
    sink.offsets, sink.width = offsets, width
    sink.token_ids = offsets + num_rows + 1
    sink.parents, sink.depths = sink.token_ids + num_nodes, sink.token_ids + 2 * num_nodes
    sink.ranks, sink.support_ids = sink.token_ids + 3 * num_nodes, sink.token_ids + 4 * num_nodes
    sink.path_probabilities = <float*> (sink.support_ids + num_cells)
    sink.path_estimates = sink.path_probabilities + num_nodes
    sink.law = sink.path_estimates + num_nodes
    memset(sink.support_ids, 0xFF, num_cells * sizeof(int32_t))  # NO_TOKEN
    memset(sink.law, 0, num_cells * sizeof(float))
    write_draft(growth, sink)
    # Past its own constructor, which takes a microsecond more.
    batch = C_DRAFT_BATCH.__new__(C_DRAFT_BATCH)
    cdef dict fields = batch.__dict__
    fields["token_ids"] = _part(numbers, cnp.NPY_INT32, sink.token_ids, num_nodes)
    fields["parents"] = _part(numbers, cnp.NPY_INT32, sink.parents, num_nodes)
    fields["offsets"] = _part(numbers, cnp.NPY_INT32, offsets, num_rows + 1)
    fields["depths"] = _part(numbers, cnp.NPY_INT32, sink.depths, num_nodes)
    fields["ranks"] = _part(numbers, cnp.NPY_INT32, sink.ranks, num_nodes)
    fields["support_ids"] = _part(numbers, cnp.NPY_INT32, sink.support_ids, num_nodes, width)
    fields["law"] = _part(numbers, cnp.NPY_FLOAT32, sink.law, num_nodes, width)
    fields["path_probabilities"] = _part(numbers, cnp.NPY_FLOAT32, sink.path_probabilities, num_nodes)
    fields["path_estimates"] = _part(numbers, cnp.NPY_FLOAT32, sink.path_estimates, num_nodes)
    return batch


cdef object _part(cnp.ndarray whole, int kind, void* first, Py_ssize_t length, Py_ssize_t width=0):
    """[length], or [length, width] where there is a width: a view into another array."""
    cdef cnp.npy_intp[2] shape
    shape[0], shape[1] = length, width
    part = cnp.PyArray_SimpleNewFromData(2 if width else 1, shape, kind, first)
    cnp.set_array_base(part, whole)
    return part


cdef tuple law_arrays(const vector[Candidate]& law):
    """(token_ids int32[K], probabilities float32[K])"""
    token_ids = np.array([law[i].token for i in range(law.size())], dtype=np.int32)
    return token_ids, np.array([law[i].probability for i in range(law.size())], dtype=np.float32)
