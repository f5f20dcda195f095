# Which tokens may follow the nodes of planned drafts, as growth looks them up.

cdef class TokenMasks:
    """Which tokens may follow each node of a planned draft: by a grammar, say.

    `BlendedLookup.draft(masks=...)` leaves out what they forbid. A node is found by the tokens that lead to it from its
    row's root; drafted nodes that were not planned have no mask.

    plan: DraftBatch with M nodes, whose drafts have no noise in them: deterministic ones. words: int32[M, W] or
    uint32[M, W], C-contiguous, not copied and not to be changed; bit t % 32 of word t // 32 says whether token t may
    follow. allows_beyond: whether tokens >= 32 W may.

    Raises ValueError on an unsound batch and on another kind of array.
    """

    cdef CTokenMasks* _masks
    cdef object _words

    def __cinit__(self, plan, words, *, allows_beyond=False):
        self._masks = NULL
        check_batch(plan)
        cdef const int32_t[::1] token_ids = plan.token_ids, parents = plan.parents, offsets = plan.offsets
        cdef Py_ssize_t row, node
        cdef int32_t above
        cdef TokenMask first
        self._words = _checked_words(words, token_ids.shape[0])
        first.words = <const uint32_t*> cnp.PyArray_DATA(self._words)
        first.size, first.allows_beyond = <int32_t> cnp.PyArray_DIM(self._words, 1), bool(allows_beyond)
        self._masks = new CTokenMasks(first)
        for row in range(offsets.shape[0] - 1):
            self._masks.tree.add_row()
            for node in range(offsets[row], offsets[row + 1]):
                above = NOWHERE if node == offsets[row] else offsets[row] + parents[node]
                self._masks.tree.add_node(above, token_ids[node])

    def __dealloc__(self):
        del self._masks

    def __len__(self):
        """Number of rows."""
        return self._masks.tree.num_rows()

    def __reduce__(self):
        raise TypeError("TokenMasks cannot be pickled; make them anew from their plan and words")


cdef object _checked_words(words, Py_ssize_t num_nodes):
    if not (
        isinstance(words, np.ndarray) and words.dtype in (np.int32, np.uint32) and words.ndim == 2
        and words.flags.c_contiguous and words.flags.aligned
        and words.shape[0] == num_nodes and 0 < words.shape[1] < 2**26
    ):
        got = f"{words.dtype} {words.shape}" if isinstance(words, np.ndarray) else type(words).__name__
        raise ValueError(
            f"words must be a C-contiguous, aligned array of int32 or uint32 [{num_nodes}, W], got {got}; give each "
            "planned node a mask"
        )
    return words


cdef TokenMasks checked_masks(masks, Py_ssize_t num_rows):
    """None, or masks with as many rows."""
    if masks is None:
        return None
    if not isinstance(masks, TokenMasks) or len(masks) != num_rows:
        got = f"{len(masks)} rows" if isinstance(masks, TokenMasks) else type(masks).__name__
        raise ValueError(f"masks must be TokenMasks of {num_rows} rows, got {got}; plan drafts for the same rows")
    return masks
