# The blended lookup: every context length votes, its weight is learned, memory is bounded.
#
# In C++: lookup.h (what is stored), learning.h, growth.h (drafts), outcome.h, snapshot.h, and what these include.

# Globals of C. Under the stable ABI a name of the module is looked up in a dict at each use.
cdef object C_DRAFT_BATCH = DraftBatch, C_KINDS = KINDS
cdef dict C_KIND_NUMBERS = KIND_NUMBERS

include "core.pxi"
include "batch.pxi"
include "masks.pxi"
include "outside.pxi"
include "requests.pxi"
include "snapshot.pxi"
include "text_rows.pxi"

MAX_DEPTH = C_MAX_DEPTH
# True where AVX-512 is used: by processor, unless the environment has STAND_PORTABLE. Drafts are the same to the bit.
HAS_WIDE_VECTORS = has_wide_vectors()
MAX_SCOPE = LAST_SCOPE
DEFAULT_MAX_BYTES = 256 << 20


cdef class BlendedLookup:
    """Context -> the law of the next token, blended over all context lengths; drafts grow best-first from it.

    Where no context of 1 to `depth` tokens knows what follows, the token before the newest one and the empty context
    are asked.

    `depth`: the longest context in tokens. `max_bytes`: hard cap on `nbytes`; rarely used contexts make room. Contexts
    take at most 32 GB. Tokens need 8 bytes per id that stay: 16 MB suffice for 262,144 ids, 1 MB for 16,384.
    `fade`: factor on a context's older observations at each new one; nearer to 1 where a longer context knew the token,
    and in the empty context. `rate`: step of the learned odds that weigh a context's evidence, longer while they are
    young; 0 keeps their start values. `num_candidates` (S): candidates that a sampled child's law covers, and entries
    of a law that are worth passing. `fingerprint`: see `LookupTree`.

    A scope is the caller's name, 0..254, for what belongs together (a problem, a user): evidence from the same scope
    is weighed apart from the rest.

    `digest`: follows from all that was learned and from the calls that started, in order; 0 while there was none. A
    file has one of its own.

    Raises ValueError on bad arguments. Verbs may be called from several threads; each is atomic, but for runs of more
    than 256 tokens: `learn` and `learn_rows` let others in after so many.
    """

    cdef CLookup* _lookup
    cdef Growth* _growth
    cdef OutsideOdds* _outside_odds
    cdef object __weakref__
    cdef readonly int depth
    cdef readonly int64_t max_bytes
    cdef readonly double fade
    cdef readonly double rate
    cdef readonly int num_candidates
    cdef readonly bytes fingerprint
    cdef readonly uint64_t digest

    def __cinit__(
        self, *, depth=12, max_bytes=DEFAULT_MAX_BYTES, fade=0.95, rate=0.05, num_candidates=10, fingerprint=b""
    ):
        self._lookup = NULL
        self._growth = NULL
        self._outside_odds = NULL
        self.depth = within(depth, "depth", 1, MAX_DEPTH, 12)
        self.max_bytes = checked_cap(max_bytes)
        self.fade = within(fade, "fade", 0.0, 1.0, 0.95)
        if self.fade == 0.0:
            raise ValueError("fade must be above 0, got 0; 0.95 is usual")
        self.rate = within(rate, "rate", 0.0, 0.5, 0.05)
        self.num_candidates = within(num_candidates, "num_candidates", 1, MOST_BLENDED, 10)
        self.fingerprint = checked_fingerprint(fingerprint)
        self._lookup = new CLookup(lookup_settings(self.depth, self.max_bytes, self.fade, self.rate))
        self._growth = new Growth()
        self._outside_odds = new OutsideOdds()
        lock_at_forks(self)

    def __dealloc__(self):
        del self._lookup
        del self._growth
        del self._outside_odds

    def __len__(self):
        """Number of contexts, all lengths together."""
        return self._figures().num_contexts

    def __repr__(self):
        return (
            f"BlendedLookup(depth={self.depth}, max_bytes={self.max_bytes}, fade={self.fade:g}, rate={self.rate:g}, "
            f"num_candidates={self.num_candidates}, contexts={len(self)}, nbytes={self.nbytes})"
        )

    def __reduce__(self):
        raise TypeError("a BlendedLookup cannot be pickled; use save() and BlendedLookup.load()")

    @property
    def nbytes(self):
        """Bytes of memory held; never above max_bytes."""
        return self._figures().nbytes

    @property
    def num_evicted(self):
        """Contexts that made room for others so far."""
        return self._figures().num_evicted

    cdef Figures _figures(self) except *:
        cdef Figures figures
        with nogil:
            figures = self._lookup.figures()
        return figures

    def _lock(self):
        with nogil:
            self._lookup.mutex.close()

    def _unlock(self):
        self._lookup.mutex.open()

    def name_vocabulary(self, bytes fingerprint not None):
        """The fingerprint of what it is going to learn, where it has none and has learned nothing yet; else nothing."""
        if not self.fingerprint and len(self) == 0:
            self.fingerprint = checked_fingerprint(fingerprint)

    def clear(self):
        """Forget every context and all that was learned about their worth; parameters stay.

        No call may be running: it would go on to teach, and the digest starts anew.
        """
        with nogil:
            self._lookup.clear()
            self._lookup.mutex.lock()
            self._outside_odds.clear()
            self._lookup.mutex.unlock()
        self.digest = 0

    def start_call(self, *, learns):
        """A number in [0, 2**64) for the random numbers of a call that starts now.

        learns: whether the call will teach. Calls get different numbers wherever one of them may draft from what the
        other one teaches, also when they start at the same instant in two threads.
        """
        return start_of_call(self.digest, learns)

    def learn(self, context, token_ids, *, top_ids=None, top_probs=None, scope=0):
        """Teach a run of tokens, or the laws of a run.

        context: int32[C], the tokens before the first scored position. token_ids: int32[L], the tokens that followed.
        top_ids int32[L, W], top_probs float32[L, W]: the best entries of the target's law of each of those tokens,
        likeliest first, padded with id -1; None for one-hots of token_ids. Position i has the context
        `context + token_ids[:i]`.

        Raises ValueError on ids outside [0, 2**31), wrong shapes, or probabilities that are not in [0, 1].
        """
        cdef uint8_t scope_number = scope_of(scope)
        cdef const int32_t[::1] tokens = tokens_of(token_ids, "token_ids")
        cdef int32_t window[MAX_WINDOW]
        cdef int32_t available = fill_window(context, self._lookup.reach(), window)
        cdef const int32_t[:, ::1] ids
        cdef const float[:, ::1] probs
        if tokens.shape[0] == 0:
            return
        if top_ids is None and top_probs is None:
            self.digest = extended_digest(self.digest, &tokens[0], tokens.shape[0])
            with nogil:
                learn_tokens(self._lookup[0], scope_number, <uint32_t*> window, available, &tokens[0], tokens.shape[0])
            return
        ids, probs = checked_laws(top_ids, top_probs, tokens.shape[0])
        self.digest = extended_digest(self.digest, &tokens[0], tokens.shape[0])
        with nogil:
            learn_laws(self._lookup[0], scope_number, <uint32_t*> window, available, &tokens[0], tokens.shape[0],
                       &ids[0, 0], &probs[0, 0], ids.shape[1])

    def learn_rows(self, tokens, lengths, num_new, *, rows=None, scopes=None):
        """Teach the newest tokens of B texts in one array, as serving engines hold them: `learn`, text by text.

        tokens: int32[R, L], C-contiguous. lengths int64[B]: tokens of each text, the new ones included. num_new
        int64[B]: how many of them are new. rows int64[B]: the texts' rows of the array; None for the first B. scopes:
        one per text, None for 0. Raises ValueError on another kind of array, what is outside it, and negative tokens.
        """
        cdef vector[int64_t] row_numbers, sizes, fresh
        cdef vector[uint8_t] scope_numbers
        cdef TextRows texts = rows_of_texts(tokens, lengths, num_new, rows, row_numbers, sizes, fresh)
        fill_scopes(scopes, texts.num_texts, scope_numbers)
        texts.scopes = scope_numbers.data()
        if not holds_any(texts, tokens, self._lookup.reach()):
            return
        self.digest = digest_of_texts(self.digest, texts)
        with nogil:
            learn_texts(self._lookup[0], texts)

    def learn_batch(self, batch, histories, top_ids, top_probs, nodes=None, *, scopes=None):
        """Teach every scored node of a step.

        batch: DraftBatch with M nodes. histories: per row int32[:], the committed tokens before its pending token.
        top_ids int32[M, W], top_probs float32[M, W]: the best entries of the target's law after each node, likeliest
        first, padded with id -1. nodes: indices into 0..M-1 to teach, None for all. scopes: one per row, None for 0.
        The odds of the laws from outside that the batch was drafted with (`DraftBatch.outside_laws`) learn as well.

        Raises ValueError on wrong shapes, nodes out of range, or probabilities that are not in [0, 1].
        """
        cdef vector[int32_t] windows, sizes
        cdef StepView step = step_view(batch, histories, self._lookup.reach(), windows, sizes)
        cdef const int32_t[:, ::1] ids
        cdef const float[:, ::1] probs
        ids, probs = checked_laws(top_ids, top_probs, batch.num_nodes)
        cdef const int64_t[::1] chosen = checked_nodes(nodes, batch.num_nodes)
        cdef vector[uint8_t] scope_numbers
        fill_scopes(scopes, step.num_rows, scope_numbers)
        cdef OutsideLaws laws = checked_outside(getattr(batch, "outside_laws", None), step.num_rows)
        cdef const COutsideLaws* outside = NULL
        if laws is not None:
            outside = laws._laws
        if chosen.shape[0] == 0:
            return
        self.digest = extended_digest(self.digest, step.token_ids, batch.num_nodes)
        with nogil:
            learn_nodes(self._lookup[0], step, scope_numbers.data(), &chosen[0], chosen.shape[0], &ids[0, 0],
                        &probs[0, 0], ids.shape[1], outside, self._outside_odds)

    def predict(self, context, *, limit=10, scope=0):
        """(token_ids int32[K], probabilities float32[K]): the blended law after a context, K <= limit.

        Tokens come in descending probability (ties: lowest id). The mass missing to 1 is unseen or cut.
        """
        cdef int32_t window[MAX_WINDOW]
        cdef int32_t available = fill_window(context, self._lookup.reach(), window)
        cdef uint8_t scope_number = scope_of(scope)
        cdef vector[Candidate] law
        cdef int32_t wanted = checked_limit(limit)
        with nogil:
            law = blended_law(self._lookup[0], <uint32_t*> window, available, scope_number, wanted)
        return law_arrays(law)

    def draft(self, histories, budget, *, seed, rows, steps, kind="deterministic", floor=0.0, rises=None,
              max_depths=None, max_nodes=None, width=None, scopes=None, outside=None, masks=None):
        """One draft per row, as an adapted DraftBatch with path probabilities and estimates.

        histories: per row int32[:], the committed tokens with the pending token last. budget: nodes of all rows
        together, pending tokens not counted; they go where acceptance is likeliest. seed, rows int64[B],
        steps int64[B]: the key of the drafting noise; deterministic drafts have none. kind: "deterministic"
        (the likeliest tokens), "mixed" (where it pays, one sampled child comes before them) or "sampled" (children
        drawn without replacement). floor: no node that is less likely to be accepted. rises: float32[budget] or None,
        the share of itself by which the step's cost rises with each further node; growth ends where a node adds less to
        the step's expected tokens. max_depths: deepest node per row, None for no bound. max_nodes: most nodes of a row,
        one number or one per row, the pending token not counted. width: most children of a node; 1 for chains, which
        mixed drafts cannot be. scopes: one per row, None for 0. outside: `OutsideLaws` of the rows, which are blended
        in and noted in the batch; they must not depend on the draft's noise. masks: `TokenMasks` of the rows; no node
        is drafted that one of them forbids.

        Raises ValueError on an empty history, an unknown kind, a floor outside [0, 1], fewer rises than the budget, a
        width of 0, or laws or masks of another number of rows.
        """
        cdef Py_ssize_t num_rows = len(histories)
        if not 1 <= num_rows <= MAX_ROWS:
            raise ValueError(f"draft needs 1 to {MAX_ROWS} histories, got {num_rows}; draft for more by further calls")
        cdef GrowthSettings settings = growth_settings(kind, budget, floor, width)
        settings.num_candidates = self.num_candidates
        cdef const float[::1] shares
        if rises is not None and settings.budget > 0:
            shares = checked_rises(rises, settings.budget)
            settings.rises = &shares[0]
        cdef vector[int32_t] windows, sizes
        cdef vector[GrowthRequest] requests
        fill_windows(histories, self._lookup.reach(), windows, sizes)
        set_windows(windows, sizes, self._lookup.reach(), requests)
        if kind != "deterministic":
            set_keys(step_keys(seed, DRAFT, rows, steps), requests)
        if max_depths is not None:
            set_depths(max_depths, requests)
        if max_nodes is not None:
            set_caps(max_nodes, requests)
        if scopes is not None:
            set_scopes(scopes, requests)
        cdef TokenMasks allowed = checked_masks(masks, num_rows)
        if allowed is not None:
            settings.masks = allowed._masks
        if outside is None:
            return self._grow(requests, settings)
        cdef OutsideLaws laws = checked_outside(outside, num_rows)
        settings.outside, settings.outside_odds = laws._laws, self._outside_odds
        batch = self._grow(requests, settings)
        (<dict> batch.__dict__)["outside_laws"] = laws
        return batch

    cdef object _grow(self, const vector[GrowthRequest]& requests, const GrowthSettings& settings):
        # No object of Python is made under the lock: the garbage collector may run then, and a finaliser may want it.
        cdef Growth* growth = self._growth
        cdef Growth* other
        self._growth = NULL  # of a draft at the same time, which makes its own
        if growth == NULL:
            growth = new Growth()
        try:
            with nogil:
                growth.grow(self._lookup[0], requests, settings)
            return grown_batch(growth[0])
        finally:
            other, self._growth = self._growth, growth
            del other

    def record_outcome(self, batch, accepted, next_tokens, *, kind):
        """Teach what became of a draft, so that path probabilities come true as often as they say.

        batch: a DraftBatch of `draft`, of any earlier step. accepted: per row int32[:], the accepted path as row-local
        nodes, root excluded. next_tokens: int32[B], the token that followed each path, NO_TOKEN where it is unknown.
        kind: as the draft was asked for; each kind is counted apart. Every call counts: record a draft once.

        Raises ValueError where the batch has no path_estimates or is unsound, where a path does not lead from its root
        down, for wrong lengths, and for an unknown kind.
        """
        cdef DraftKind drafted = kind_of(kind, "say what the draft was asked for")
        cdef const float[::1] estimates = checked_estimates(batch)
        check_batch(batch)
        cdef const int32_t[::1] token_ids = batch.token_ids, parents = batch.parents, offsets = batch.offsets
        cdef const int32_t[::1] next_ids = int32_vector(next_tokens, "next_tokens")
        cdef Py_ssize_t num_rows = len(batch)
        check_outcomes(num_rows, len(accepted), next_ids.shape[0])
        if num_rows == 0:
            return
        cdef vector[int32_t] nodes
        cdef vector[int64_t] ends
        fill_paths(accepted, nodes, ends)
        cdef Outcome outcome
        outcome.token_ids, outcome.parents, outcome.offsets = &token_ids[0], &parents[0], &offsets[0]
        outcome.estimates, outcome.next_tokens, outcome.accepted_ends = &estimates[0], &next_ids[0], ends.data()
        outcome.accepted, outcome.num_rows = nodes.data(), num_rows
        check_paths(outcome, accepted)
        self.digest = extended_digest(self.digest, &next_ids[0], num_rows)
        with nogil:
            c_record_outcome(outcome, drafted, self._lookup[0])

    def check(self):
        """Raise RuntimeError where an invariant of the lookup is broken; for tests."""
        check_sound(self._lookup[0])

    @cython.always_allow_keywords(True)
    def save(self, path):
        """Write to a file: atomic, an existing file stays whole until the new one is complete. Raises OSError.

        Ages and scopes are not kept: what is loaded counts as learned elsewhere.
        """
        cdef Snapshot snapshot
        with nogil:
            take_snapshot(self._lookup[0], snapshot)
        write_blended_lookup(path, self._parameters(), arrays_of(snapshot))

    load = classmethod(load_blended_lookup)

    def _parameters(self):
        return {
            "depth": self.depth,
            "max_bytes": self.max_bytes,
            "fade": self.fade,
            "rate": self.rate,
            "num_candidates": self.num_candidates,
            "fingerprint": self.fingerprint,
        }
