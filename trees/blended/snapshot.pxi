# Snapshots as arrays of Python: the fields are those of a file (file.py).

# By the length of a context the most tokens that it keeps; the last one is of the token before the newest.
MOST_ENTRIES = tuple([CLookup.max_entries(order) for order in range(NUM_ORDERS)])
NUM_ODDS = C_NUM_ODDS

cdef dict arrays_of(Snapshot& snapshot):
    return {
        "roots": _copy(cnp.NPY_UINT32, snapshot.roots.data(), snapshot.roots.size()),
        "sizes": _copy(cnp.NPY_UINT8, snapshot.sizes.data(), snapshot.sizes.size()),
        "visits": _copy(cnp.NPY_UINT8, snapshot.visits.data(), snapshot.visits.size()),
        "tokens": _copy(cnp.NPY_UINT32, snapshot.tokens.data(), snapshot.tokens.size()),
        "weights": _copy(cnp.NPY_UINT16, snapshot.weights.data(), snapshot.weights.size()),
        "has_child": _copy(cnp.NPY_UINT8, snapshot.has_child.data(), snapshot.has_child.size()),
        "odds": _copy(cnp.NPY_FLOAT32, snapshot.odds.data(), snapshot.odds.size()),
    }


cdef object _copy(int kind, const void* values, Py_ssize_t length):
    cdef cnp.npy_intp size = length
    cdef cnp.ndarray array = cnp.PyArray_SimpleNew(1, &size, kind)
    if length:
        memcpy(cnp.PyArray_DATA(array), values, cnp.PyArray_NBYTES(array))
    return array


cdef const void* _numbers(dict arrays, str name, int64_t* count) except? NULL:
    """Of an array with one axis, of the type that files give it, and how many there are."""
    cdef cnp.ndarray array = arrays[name]
    count[0] = cnp.PyArray_DIM(array, 0)
    return cnp.PyArray_DATA(array)


cdef SnapshotView view_of(dict arrays) except *:
    """Valid as long as the arrays live, which are as `read_blended_lookup` gives them."""
    cdef SnapshotView view
    cdef int64_t num_odds
    view.roots = <const uint32_t*> _numbers(arrays, "roots", &view.num_roots)
    view.sizes = <const uint8_t*> _numbers(arrays, "sizes", &view.num_contexts)
    view.visits = <const uint8_t*> _numbers(arrays, "visits", &view.num_contexts)
    view.tokens = <const uint32_t*> _numbers(arrays, "tokens", &view.num_entries)
    view.weights = <const uint16_t*> _numbers(arrays, "weights", &view.num_entries)
    view.has_child = <const uint8_t*> _numbers(arrays, "has_child", &view.num_entries)
    view.odds = <const float*> _numbers(arrays, "odds", &num_odds)
    return view


cdef void restore(path, dict arrays, CLookup& lookup, max_bytes, bint is_its_cap) except *:
    """Fill an empty lookup. is_its_cap: its cap is no smaller than that of the one that was saved, so that what does
    not fit is left out.

    Raises LookupFileError where the arrays are broken, or too much for a smaller cap."""
    cdef SnapshotView view = view_of(arrays)
    cdef SnapshotReader* reader = new SnapshotReader(view, lookup, is_its_cap)
    cdef Restored restored
    try:
        restored = reader.read()
    finally:
        del reader
    if restored == Restored.too_large:
        raise LookupFileError(f"{path} must fit into max_bytes={max_bytes}, got more; load it with a larger cap")
    if restored == Restored.damaged:
        raise LookupFileError(f"{path} must hold sound contexts, got a broken one; build it again")


cdef void check_sound(CLookup& lookup) except *:
    cdef const char* fault
    with nogil:
        fault = lookup.find_fault()
    if fault != NULL:
        raise RuntimeError(f"the lookup must be sound, got {fault.decode()}")


cdef class BlendedLookup  # in lookup.pxi


def load_blended_lookup(cls, path, *, fingerprint=None, max_bytes=None):
    """Read a file written by `save`.

    fingerprint: the vocabulary that the file must be of; None accepts any. max_bytes: another cap than the file's;
    a smaller one must hold all contexts. Else the few are left out that came while a full lookup was saved.
    Raises LookupFileError where the file is damaged, of another format version or vocabulary, or too large for the
    cap, and where a small file asks for a huge cap; ValueError for a fingerprint or a cap that no lookup may have;
    OSError where unreadable.
    """
    if max_bytes is not None:
        max_bytes = checked_cap(max_bytes)
    parameters, arrays, digest = read_blended_lookup(
        path, num_odds=C_NUM_ODDS, fingerprint=fingerprint, max_bytes=max_bytes
    )
    own_cap = parameters["max_bytes"]
    if max_bytes is not None:
        parameters["max_bytes"] = max_bytes
    cdef BlendedLookup lookup = empty_lookup(cls, path, parameters)
    restore(path, arrays, lookup._lookup[0], lookup.max_bytes, lookup.max_bytes >= own_cap)
    lookup.digest = digest
    return lookup
