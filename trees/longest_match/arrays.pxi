# Tables and drafts as arrays of Python.

cdef tuple views_of(OrderTable* table, int num_candidates):
    cdef int64_t num_contexts = table.size()
    return (
        np.asarray(<int32_t[:num_contexts, :table.order]> table.keys.data()),
        np.asarray(<uint32_t[:num_contexts]> table.counts.data()),
        np.asarray(<int32_t[:num_contexts, :num_candidates]> table.top_ids.data()),
        np.asarray(<float[:num_contexts, :num_candidates]> table.top_probs.data()),
    )


def empty_table(order, num_candidates):
    return (
        np.empty((0, order), np.int32),
        np.empty(0, np.uint32),
        np.empty((0, num_candidates), np.int32),
        np.empty((0, num_candidates), np.float32),
    )


def empty_arrays(room, num_candidates):
    return {
        "token_ids": np.empty(room, dtype=np.int32),
        "parents": np.empty(room, dtype=np.int32),
        "depths": np.empty(room, dtype=np.int32),
        "ranks": np.empty(room, dtype=np.int32),
        "slots": np.empty(room, dtype=np.int32),
        "support_ids": np.full((room, num_candidates), NO_TOKEN, dtype=np.int32),
        "law": np.zeros((room, num_candidates), dtype=np.float32),
    }


cdef DraftSink sink_of(dict arrays) except *:
    cdef int32_t[::1] token_ids = arrays["token_ids"], parents = arrays["parents"], depths = arrays["depths"]
    cdef int32_t[::1] ranks = arrays["ranks"], slots = arrays["slots"]
    cdef int32_t[:, ::1] support_ids = arrays["support_ids"]
    cdef float[:, ::1] law = arrays["law"]
    cdef DraftSink sink
    sink.token_ids, sink.parents, sink.depths = &token_ids[0], &parents[0], &depths[0]
    sink.ranks, sink.slots = &ranks[0], &slots[0]
    sink.support_ids, sink.law = &support_ids[0, 0], &law[0, 0]
    sink.num_nodes = 0
    return sink


def batch_of(arrays, num_nodes, num_rows, adapted):
    filled = {name: array[:num_nodes] for name, array in arrays.items()}
    roots = np.flatnonzero(filled["parents"] < 0)
    offsets = np.append(roots, num_nodes).astype(np.int32)
    if len(offsets) != num_rows + 1:
        raise AssertionError("a draft must have one root per row")
    return DraftBatch(offsets=offsets, adapted=adapted, **filled)
