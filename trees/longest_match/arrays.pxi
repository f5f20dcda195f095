# Tables and drafts as arrays of Python.

cdef object _view(int kind, int num_axes, int64_t length, int64_t width, const void* values):
    """[length], or [length, width]: the values themselves."""
    cdef cnp.npy_intp[2] shape
    shape[0], shape[1] = length, width
    return cnp.PyArray_SimpleNewFromData(num_axes, shape, kind, <void*> values)


cdef tuple views_of(OrderTable* table, int num_candidates):
    cdef int64_t count = table.size()
    return (
        _view(cnp.NPY_INT32, 2, count, table.order, table.keys.data()),
        _view(cnp.NPY_UINT32, 1, count, 0, table.counts.data()),
        _view(cnp.NPY_INT32, 2, count, num_candidates, table.top_ids.data()),
        _view(cnp.NPY_FLOAT32, 2, count, num_candidates, table.top_probs.data()),
    )


cdef int32_t* _data_of(dict arrays, str name) except? NULL:
    return <int32_t*> cnp.PyArray_DATA(<cnp.ndarray?> arrays[name])


cdef ShapeArrays sink_of(dict arrays) except *:
    """Of `empty_arrays`."""
    cdef ShapeArrays sink
    sink.token_ids, sink.parents = _data_of(arrays, "token_ids"), _data_of(arrays, "parents")
    sink.depths, sink.ranks = _data_of(arrays, "depths"), _data_of(arrays, "ranks")
    sink.slots, sink.support_ids = _data_of(arrays, "slots"), _data_of(arrays, "support_ids")
    sink.law = <float*> _data_of(arrays, "law")
    sink.num_nodes = 0
    return sink
