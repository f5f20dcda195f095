# Laws from outside of a lookup, as arrays of Python and as the tree in C++ that growth and learning look them up in.

cdef class OutsideLaws:
    """What trained heads say comes next: a small tree per row, with a law at each of its nodes.

    `BlendedLookup.draft(outside=...)` blends a node's law with what its contexts say, by odds that `learn_batch`
    learns. A node is found by the tokens that lead to it from the row's pending token; drafted nodes that are not in
    the tree have no law from outside.

    offsets: int32[B + 1], row b owns nodes offsets[b] to offsets[b + 1] - 1, the first of them its root, or none.
    parents: int32[L], row-local, before their children; NO_PARENT at roots. token_ids: int32[L], what leads from the
    parent to the node; ANY_TOKEN for all tokens that no sibling has; roots' are not read. A node without children goes
    on as its sibling of ANY_TOKEN does, so that laws may depend on the one token before. top_ids int32[L, K],
    top_probs float32[L, K]: the best tokens of the law after each node, likeliest first, padded with id NO_TOKEN; K <=
    64. A law may be empty. source: 0..3, the head; the worth of each is learned apart.

    Nothing in it may depend on the draft that is to be grown: it is made before. Values are copied.

    Raises ValueError on wrong shapes, unsound trees, and laws that do not descend or name a token twice.
    """

    cdef COutsideLaws* _laws
    cdef readonly int source

    ANY_TOKEN = C_ANY_TOKEN

    def __cinit__(self, offsets, parents, token_ids, top_ids, top_probs, *, source=0):
        self._laws = NULL
        source = whole(source, "source")
        if not 0 <= source < C_NUM_SOURCES:
            raise ValueError(f"source must be in [0, {C_NUM_SOURCES}), got {source}; number your heads from 0")
        self.source = source
        cdef const int32_t[::1] ends = int32_vector(offsets, "offsets"), above = int32_vector(parents, "parents")
        cdef const int32_t[::1] tokens = int32_vector(token_ids, "token_ids")
        ids, probs = checked_laws(top_ids, top_probs, above.shape[0])
        _check_rows(ends, above, tokens)
        self._laws = new COutsideLaws(source)
        fill_outside(self._laws[0], ends, above, tokens, ids, probs)

    def __dealloc__(self):
        del self._laws

    def __len__(self):
        """Number of rows."""
        return self._laws.num_rows()

    @property
    def num_nodes(self):
        """Nodes of all rows."""
        return self._laws.num_nodes()

    def __reduce__(self):
        raise TypeError("OutsideLaws cannot be pickled; make them anew from their arrays")

    of_heads = classmethod(laws_of_heads)


cdef void _check_rows(const int32_t[::1] offsets, const int32_t[::1] parents, const int32_t[::1] tokens) except *:
    cdef Py_ssize_t num_rows = offsets.shape[0] - 1, row, node
    cdef bool_t sound = num_rows >= 0 and tokens.shape[0] == parents.shape[0]
    sound = sound and offsets[0] == 0 and offsets[num_rows] == parents.shape[0]
    for row in range(num_rows if sound else 0):
        sound = sound and offsets[row] <= offsets[row + 1] <= parents.shape[0]
        for node in range(offsets[row], offsets[row + 1] if sound else 0):
            if node == offsets[row]:
                sound = sound and parents[node] == -1
            else:
                sound = sound and 0 <= parents[node] < node - offsets[row]
                sound = sound and (tokens[node] >= 0 or tokens[node] == C_ANY_TOKEN)
    if not sound:
        raise ValueError(
            "offsets, parents and token_ids must be one tree per row, its root first with parent -1, parents before "
            "their children, tokens >= 0 or ANY_TOKEN; a row without laws has no node"
        )


cdef void fill_outside(COutsideLaws& laws, const int32_t[::1] offsets, const int32_t[::1] parents,
                       const int32_t[::1] tokens, const int32_t[:, ::1] ids, const float[:, ::1] probs) except *:
    """All rows; what the trees and laws must not be is refused here."""
    cdef Py_ssize_t row, node, i
    cdef int32_t above
    for row in range(offsets.shape[0] - 1):
        laws.add_row()
        for node in range(offsets[row], offsets[row + 1]):
            above = NOWHERE if node == offsets[row] else offsets[row] + parents[node]
            if laws.add_node(above, tokens[node]) == NOWHERE:
                raise ValueError(f"siblings must have distinct tokens, got {tokens[node]} twice; give it one node")
            for i in range(ids.shape[1]):
                if ids[node, i] >= 0 and not laws.add_token(ids[node, i], probs[node, i]):
                    raise ValueError(
                        f"a law must hold at most {C_MAX_LAW_SIZE} distinct tokens, likeliest first, got token "
                        f"{ids[node, i]} with {probs[node, i]:g} at place {i}; sort it and leave doubles out"
                    )


cdef OutsideLaws checked_outside(outside, Py_ssize_t num_rows):
    """None, or laws with as many rows."""
    if outside is None:
        return None
    if not isinstance(outside, OutsideLaws) or len(outside) != num_rows:
        got = f"{len(outside)} rows" if isinstance(outside, OutsideLaws) else type(outside).__name__
        raise ValueError(f"outside must be OutsideLaws of {num_rows} rows, got {got}; rows without laws have no nodes")
    return outside
