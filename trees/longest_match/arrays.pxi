# Tables and drafts as arrays of Python.

cdef tuple views_of(OrderTable* table, int num_candidates):
    cdef int64_t num_contexts = table.size()
    return (
        np.asarray(<int32_t[:num_contexts, :table.order]> table.keys.data()),
        np.asarray(<uint32_t[:num_contexts]> table.counts.data()),
        np.asarray(<int32_t[:num_contexts, :num_candidates]> table.top_ids.data()),
        np.asarray(<float[:num_contexts, :num_candidates]> table.top_probs.data()),
    )


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
