# STAND's lookup (arXiv 2506.04708): what followed each context, with probabilities.
#
# In C++: table.h (what is stored), learning.h and fill_shape.h (drafts).

include "core.pxi"
include "requests.pxi"
include "arrays.pxi"

def children_of(int32_t kind, const float[::1] probabilities not None, const double[::1] uniforms not None,
                int32_t num_children):
    """What `stand.trees.sampling.draw_children` gives, for arguments that it has checked; kind by its number."""
    cdef Children children
    c_draw_children(<DraftKind> kind, &probabilities[0], &uniforms[0], probabilities.shape[0], num_children, children)
    picks, laws = np.array(children.picks, dtype=np.int32), np.array(children.laws, dtype=np.float32)
    return picks, laws.reshape(len(picks), len(probabilities))


cdef class LookupTree


def load_lookup_tree(cls, path, *, fingerprint=None):
    """Read a file written by `save`.

    fingerprint: the vocabulary that the file must be of; None accepts any.
    Raises LookupFileError where the file is damaged, newer, or of another vocabulary; OSError where unreadable.
    """
    parameters, tables, digest = read_lookup_tree(path, fingerprint=fingerprint)
    cdef LookupTree lookup = empty_lookup(cls, path, parameters)
    lookup._restore(path, tables)
    lookup.digest = digest
    return lookup


cdef class LookupTree:
    """Context -> the likeliest next tokens, their probabilities and how often the context was observed.

    `orders`: context lengths in tokens, ascending, within 1..16. `num_candidates` (S): candidates kept per context.
    `min_rate`: the weight of a new observation is max(1 / (count + 1), min_rate); 0 gives STAND's plain average
    (STAND, section 3.1), larger values let old evidence fade. `fingerprint`: identifies the vocabulary (see
    `vocabulary_fingerprint`), stored in saved files. `digest`: follows from all that was learned and from the
    calls that started, in order; 0 while there was none. A file has one of its own.

    Raises ValueError on bad arguments. Verbs may be called from several threads; each is atomic.
    """

    cdef Lookup* _lookup
    cdef object __weakref__
    cdef readonly tuple orders
    cdef readonly int num_candidates
    cdef readonly double min_rate
    cdef readonly bytes fingerprint
    cdef readonly uint64_t digest

    def __cinit__(self, *, orders=(1, 2, 3, 4), num_candidates=10, min_rate=0.1, fingerprint=b""):
        self._lookup = NULL
        self.orders = checked_orders(orders)
        self.num_candidates = within(num_candidates, "num_candidates", 1, MOST_KEPT, 10)
        self.min_rate = within(min_rate, "min_rate", 0.0, 1.0, 0.1)
        self.fingerprint = checked_fingerprint(fingerprint)
        self._lookup = new Lookup(self.orders, self.num_candidates, self.min_rate)
        lock_at_forks(self)

    def __dealloc__(self):
        del self._lookup

    def __len__(self):
        """Number of contexts, all orders together."""
        cdef int64_t size
        with nogil:
            size = self._lookup.size()
        return size

    def __repr__(self):
        return (
            f"LookupTree(orders={self.orders}, num_candidates={self.num_candidates}, min_rate={self.min_rate:g}, "
            f"contexts={len(self)}, nbytes={self.nbytes})"
        )

    def __reduce__(self):
        raise TypeError("a LookupTree cannot be pickled; use save() and LookupTree.load()")

    @property
    def nbytes(self):
        """Bytes of memory held by the tables."""
        cdef int64_t nbytes
        with nogil:
            nbytes = self._lookup.nbytes()
        return nbytes

    def _lock(self):
        with nogil:
            self._lookup.mutex.lock()

    def _unlock(self):
        self._lookup.mutex.unlock()

    def name_vocabulary(self, bytes fingerprint not None):
        """The fingerprint of what it is going to learn, where it has none and has learned nothing yet; else nothing."""
        if not self.fingerprint and len(self) == 0:
            self.fingerprint = checked_fingerprint(fingerprint)

    def clear(self):
        """Forget everything; parameters stay. No call may be running, see `BlendedLookup.clear`."""
        with nogil:
            self._lookup.clear()
        self.digest = 0

    def copy(self):
        """An independent lookup tree with the same content."""
        cdef LookupTree twin = LookupTree(**self._parameters())
        with nogil:
            twin._lookup.assign(self._lookup[0])
        twin.digest = self.digest
        return twin

    def start_call(self, *, learns):
        """A number in [0, 2**64) for the random numbers of a call that starts now.

        learns: whether the call will teach. Calls get different numbers wherever one of them may draft from what the
        other one teaches, also when they start at the same instant in two threads.
        """
        return start_of_call(self.digest, learns)

    def learn(self, context, token_ids, *, top_ids=None, top_probs=None):
        """Teach the laws of a run of tokens.

        context: int32[C], the tokens before the first scored position. token_ids: int32[L], the tokens that followed.
        top_ids int32[L, W], top_probs float32[L, W]: the best entries of the target's law of each of those tokens,
        padded with id -1; None for one-hots of token_ids. Position i has the context `context + token_ids[:i]`. A law
        without positive mass is skipped.

        Raises ValueError on ids outside [0, 2**31), wrong shapes, or probabilities that are not in [0, 1].
        """
        cdef const int32_t[::1] before = tokens_of(tail(context, self._lookup.max_order()), "context")
        cdef const int32_t[::1] tokens = np.concatenate([before, tokens_of(token_ids, "token_ids")])
        cdef int64_t num_before = before.shape[0], num_scored = tokens.shape[0] - before.shape[0]
        cdef const int32_t[:, ::1] ids
        cdef const float[:, ::1] probs
        if num_scored == 0:
            return
        if top_ids is None and top_probs is None:
            self.digest = extended_digest(self.digest, &tokens[0], tokens.shape[0])
            with nogil:
                learn_run(self._lookup[0], &tokens[0], num_before, num_scored, NULL, NULL, 0)
            return
        ids, probs = checked_laws(top_ids, top_probs, num_scored)
        self.digest = extended_digest(self.digest, &tokens[0], tokens.shape[0])
        with nogil:
            learn_run(self._lookup[0], &tokens[0], num_before, num_scored, &ids[0, 0], &probs[0, 0], ids.shape[1])

    def learn_batch(self, batch, histories, top_ids, top_probs, nodes=None):
        """Teach every scored node of a step.

        batch: DraftBatch with M nodes. histories: per row int32[:], the committed tokens before its pending token.
        top_ids int32[M, W], top_probs float32[M, W]: the best entries of the target's law after each node, padded with
        id -1. nodes: indices into 0..M-1 to teach, None for all. Node i's context is its row's history plus the path
        from the root to i, inclusive.

        Raises ValueError on wrong shapes, nodes out of range, or probabilities that are not in [0, 1].
        """
        cdef vector[int32_t] windows, sizes
        cdef StepView step = step_view(batch, histories, self._lookup.max_order(), windows, sizes)
        cdef const int32_t[:, ::1] ids
        cdef const float[:, ::1] probs
        ids, probs = checked_laws(top_ids, top_probs, batch.num_nodes)
        cdef const int64_t[::1] chosen = checked_nodes(nodes, batch.num_nodes)
        if chosen.shape[0] == 0:
            return
        self.digest = extended_digest(self.digest, step.token_ids, batch.num_nodes)
        with nogil:
            learn_nodes(self._lookup[0], step, &chosen[0], chosen.shape[0], &ids[0, 0], &probs[0, 0], ids.shape[1])

    def lookup(self, context, *, floor_order=1):
        """(order, token_ids int32[K], probabilities float32[K], count) of the longest known context, or None.

        Tokens come in descending probability (ties: lowest id). Probabilities are as stored: a law that was cut to
        the best S sums to less than 1.
        """
        self._check_floor(floor_order)
        cdef int32_t window[16]  # MAX_ORDER
        cdef int32_t available = fill_window(context, self._lookup.max_order(), window)
        cdef int32_t least = floor_order
        cdef vector[int32_t] token_ids
        cdef vector[float] probabilities
        cdef Law law
        with nogil:
            law = self._lookup.copy_longest(window, available, least, token_ids, probabilities)
        if law.size == 0:
            return None
        return law.order, np.array(token_ids, np.int32), np.array(probabilities, np.float32), law.count

    def draft(self, histories, shape, *, seed, rows, steps, positions=None, kind="sampled", floor_order=1):
        """One draft per row, as an adapted DraftBatch.

        histories: per row int32[:], the committed tokens with the pending token last. shape: TreeShape, or one per
        row. seed, rows int64[B], steps int64[B]: the key of the drafting noise. kind: "sampled" (without
        replacement), "mixed" (one sampled child first, then the likeliest ones) or "deterministic" (the likeliest).
        Slots for which no token is known are left out, with all that hangs on them.

        kind "independent" draws every child from the whole law, so siblings may be equal (for `specinfer`, `spectr`).
        kind "coupled" ranks candidates by q / E, where E is the noise that the `coupled` verifier draws with (Daliri et
        al., arXiv 2408.07978), keyed by (seed, row, absolute position, token). The result is not adapted: no ratio rule
        may take it. positions int64[B]: the absolute index of each row's first new token, None for the histories'
        lengths; other kinds ignore it.

        Raises ValueError on an empty history, an unknown kind, an unsound shape, or a position outside [0, 2**31).
        """
        self._check_floor(floor_order)
        shapes = shapes_per_row(shape, len(histories), kind)
        cdef vector[int32_t] windows, sizes
        fill_windows(histories, self._lookup.max_order(), windows, sizes)
        cdef list held = []
        cdef vector[ShapeView] shape_views
        cdef vector[DraftRequest] requests
        view_shapes(shapes, held, shape_views)
        set_requests(windows, sizes, step_keys(seed, DRAFT, rows, steps), requests)
        cdef size_t index
        for index in range(requests.size()):
            requests[index].kind, requests[index].floor_order = <DraftKind> <int32_t> KIND_NUMBERS[kind], floor_order
        if kind == "coupled":
            share_noise(requests, seed, rows, list(map(len, histories)) if positions is None else positions)
        cdef int64_t room = 0
        for index in range(shape_views.size()):
            room += shape_views[index].num_slots
        arrays = empty_arrays(room, self.num_candidates)
        cdef ShapeArrays sink = sink_of(arrays)
        with nogil:
            draft_rows(self._lookup[0], shape_views, requests, sink)
        return batch_of(arrays, sink.num_nodes, len(histories), adapted=kind != "coupled")

    @cython.always_allow_keywords(True)
    def save(self, path):
        """Write to a file: atomic, an existing file stays whole until the new one is complete. Raises OSError."""
        cdef LookupTree snapshot = self.copy()
        write_lookup_tree(path, self._parameters(), snapshot._table_views())

    load = classmethod(load_lookup_tree)

    def _check_floor(self, floor_order):
        within(floor_order, "floor_order", 1, MAX_ORDER, 1)

    def _parameters(self):
        return {
            "orders": list(self.orders),
            "num_candidates": self.num_candidates,
            "min_rate": self.min_rate,
            "fingerprint": self.fingerprint,
        }

    cdef list _table_views(self):
        """Per order: (keys int32[n, order], counts uint32[n], top_ids int32[n, S], top_probs float32[n, S]), valid as
        long as this lookup tree lives and is not taught."""
        cdef size_t index
        cdef OrderTable* table
        views = []
        for index in range(self._lookup.tables.size()):
            table = &self._lookup.tables[index]
            if table.size() > 0:
                views.append(views_of(table, self.num_candidates))
            else:
                views.append(empty_table(table.order, self.num_candidates))
        return views

    cdef void _restore(self, path, tables) except *:
        cdef const int32_t[:, ::1] keys
        cdef const uint32_t[::1] counts
        cdef const int32_t[:, ::1] top_ids
        cdef const float[:, ::1] top_probs
        cdef size_t index
        cdef bool_t sound
        for index, table in enumerate(tables):
            keys, counts, top_ids, top_probs = table
            if counts.shape[0] == 0:
                continue
            with nogil:
                sound = restore_table(self._lookup.tables[index], counts.shape[0], &keys[0, 0], &counts[0],
                                      &top_ids[0, 0], &top_probs[0, 0])
            if not sound:
                raise LookupFileError(
                    f"{path} must hold sound contexts, got a broken one of order {self.orders[index]}; build it again"
                )
