"""The blended lookup tree: every context length votes, its weight is learned, memory is bounded.

The work is done in C++ (blocks.h, odds.h, cursor.h, recent_ends.h, contexts.h, evidence.h, blender.h, calibration.h,
frontier.h, growth.h) without the interpreter's lock; this file checks arguments and owns memory.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memset
from libcpp cimport bool as bool_t
from libcpp.vector cimport vector

import numpy as np

cnp.import_array()

from stand.trees.draft import DraftBatch
from stand.trees.longest_match.lookup import (
    KINDS, _check_batch, _check_tokens, _checked_nodes, _checked_rows, _step_keys, _tail, _vector,
)
from stand.trees.longest_match.file import LookupFileError
from stand.trees.blended.file import read_store_file, write_store_file

cdef extern from "<mutex>" namespace "std" nogil:
    cdef cppclass mutex:
        void lock() except +
        void unlock()

cdef extern from "odds.h" namespace "stand" nogil:
    const int32_t C_MAX_DEPTH "stand::MAX_DEPTH"

    cdef cppclass Clock:
        uint32_t now
        uint8_t scope

cdef extern from "evidence.h" namespace "stand" nogil:
    bool_t has_wide_vectors()

cdef extern from "store.h" namespace "stand" nogil:
    cdef cppclass Cursor:
        pass

    cdef cppclass StoreSettings:
        int32_t depth
        int64_t max_bytes
        float fade
        float rate
        bool_t learns_odds

    cdef cppclass ContextStore:
        ContextStore(const StoreSettings& settings) except +
        mutex mutex
        Clock clock
        Calibration* calibrations
        int32_t reach()
        int64_t num_contexts()
        int64_t num_evicted()
        int64_t nbytes()
        void clear() except +
        Cursor locate "locate<stand::Cursor>" (const uint32_t* window, int32_t available)
        void learn_run(const uint32_t* window, int32_t available, const int32_t* tokens, int64_t num_tokens) except +
        void learn_row(Cursor& cursor, const int32_t* ids, const float* probs, int32_t width) except +
        const char* find_fault()

    const int64_t MIN_BYTES "stand::ContextStore::MIN_BYTES"

cdef extern from "../longest_match/fill_shape.h" namespace "stand" nogil:
    cdef enum class DraftKind(int32_t):
        deterministic

cdef extern from "blender.h" namespace "stand" nogil:
    cdef cppclass Candidate:
        uint32_t token
        float probability

    vector[Candidate] blended_law(const ContextStore& store, const uint32_t* window, int32_t available, uint8_t scope,
                                  int32_t limit) except +

cdef extern from "growth.h" namespace "stand" nogil:
    cdef cppclass GrowthRequest:
        const int32_t* window
        int32_t window_size
        int32_t max_depth
        uint8_t scope
        uint64_t key

    cdef cppclass GrowthSettings:
        DraftKind kind
        int32_t budget
        float floor
        int32_t support_size
        const float* rises

    cdef cppclass GrowthSink:
        const int32_t* offsets
        int32_t* token_ids
        int32_t* parents
        int32_t* depths
        int32_t* ranks
        float* path_probabilities
        float* path_estimates
        int32_t* support_ids
        float* law
        int32_t width

    cdef cppclass Growth:
        vector[int32_t] row_sizes
        void grow(const ContextStore& store, const vector[GrowthRequest]& requests,
                  const GrowthSettings& settings) except +
        int32_t width()
        void write(const GrowthSink& sink)

    int32_t path_window(const GrowthRequest& row, const int32_t* token_ids, const int32_t* parents, int32_t node,
                        int32_t limit, uint32_t* window)

cdef extern from "calibration.h" namespace "stand" nogil:
    cdef cppclass Calibration:
        pass

cdef extern from "outcome.h" namespace "stand" nogil:
    cdef cppclass Outcome:
        const int32_t* token_ids
        const int32_t* parents
        const int32_t* offsets
        const float* estimates
        const int32_t* accepted
        const int64_t* accepted_ends
        const int32_t* next_tokens
        int64_t num_rows

    int64_t first_broken_path(const Outcome& outcome)
    void c_record_outcome "stand::record_outcome"(const Outcome& outcome, Calibration& calibration) except +

cdef extern from "snapshot.h" namespace "stand" nogil:
    cdef cppclass StoreImage:
        vector[uint32_t] roots
        vector[uint8_t] sizes
        vector[uint8_t] visits
        vector[uint32_t] tokens
        vector[uint16_t] weights
        vector[uint8_t] has_child
        vector[float] odds

    cdef cppclass ImageView:
        const uint32_t* roots
        const uint8_t* sizes
        const uint8_t* visits
        const uint32_t* tokens
        const uint16_t* weights
        const uint8_t* has_child
        const float* odds
        int64_t num_roots
        int64_t num_contexts
        int64_t num_entries

    cdef enum class Restored(int32_t):
        complete
        damaged
        too_large

    cdef cppclass StoreReader:
        StoreReader(const ImageView& image, ContextStore& store)
        Restored read() except +

    const int64_t C_NUM_ODDS "stand::NUM_ODDS"
    void take_image(const ContextStore& store, StoreImage& image) except +

cdef enum:
    MAX_WINDOW = 16  # at least MAX_DEPTH
    LAST_SCOPE = 254
    NO_BOUND = 2147483647  # of depths

MAX_DEPTH = C_MAX_DEPTH
# AVX-512 is used: by processor, unless the environment has STAND_PORTABLE. Drafts are alike to the bit.
HAS_WIDE_VECTORS = has_wide_vectors()
MAX_SCOPE = LAST_SCOPE
DEFAULT_MAX_BYTES = 256 << 20
LARGEST_ESTIMATE = 1.001  # probabilities are rounded


cdef class BlendedLookup:
    """Context -> the law of the next token, blended over all context lengths; drafts grow best-first from it.

    Where no context of 1 to `depth` tokens knows what follows, the token before the newest one and the empty context
    are asked.

    `depth`: the longest context in tokens. `max_bytes`: hard cap on `nbytes`; rarely used contexts make room.
    `fade`: what a context's older observations are multiplied by at a new one. `rate`: step of the learned odds that
    weigh a context's evidence, longer while they are young; 0 keeps their start values. `row_size` (S): candidates
    that a sampled child's law covers, and entries of a row that are worth passing. `fingerprint`: see `LookupTree`.

    A scope is the caller's name, 0..254, for what belongs together (a problem, a user): evidence from the same scope
    is weighed apart from the rest.

    Raises ValueError on bad arguments. Verbs may be called from several threads; each is atomic.
    """

    cdef ContextStore* _store
    cdef Growth _growth
    cdef readonly int depth
    cdef readonly int64_t max_bytes
    cdef readonly double fade
    cdef readonly double rate
    cdef readonly int row_size
    cdef readonly bytes fingerprint

    def __cinit__(self, *, depth=12, max_bytes=DEFAULT_MAX_BYTES, fade=0.95, rate=0.05, row_size=10, fingerprint=b""):
        self._store = NULL
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth must be in [1, {MAX_DEPTH}], got {depth}; 12 is usual")
        if not MIN_BYTES <= max_bytes < 2**40:
            raise ValueError(f"max_bytes must be in [{MIN_BYTES}, 2**40), got {max_bytes}; 256 MB is usual")
        if not 0.0 < fade <= 1.0:
            raise ValueError(f"fade must be in (0, 1], got {fade}; 0.95 is usual")
        if not 0.0 <= rate <= 0.5:
            raise ValueError(f"rate must be in [0, 0.5], got {rate}; 0.05 is usual")
        if not 1 <= row_size <= 64:
            raise ValueError(f"row_size must be in [1, 64], got {row_size}; 10 is usual")
        if not isinstance(fingerprint, bytes):
            raise ValueError(f"fingerprint must be bytes, got {fingerprint!r}; use vocabulary_fingerprint()")
        self.depth, self.max_bytes, self.fade, self.rate = depth, max_bytes, fade, rate
        self.row_size, self.fingerprint = row_size, fingerprint
        self._store = self._new_store()

    def __dealloc__(self):
        del self._store

    cdef ContextStore* _new_store(self) except NULL:
        cdef StoreSettings settings
        settings.depth, settings.max_bytes, settings.fade, settings.rate = (
            self.depth, self.max_bytes, self.fade, self.rate
        )
        settings.learns_odds = self.rate > 0.0
        return new ContextStore(settings)

    def __len__(self):
        """Number of contexts, all lengths together."""
        return self._store.num_contexts()

    def __repr__(self):
        return (
            f"BlendedLookup(depth={self.depth}, max_bytes={self.max_bytes}, fade={self.fade:g}, rate={self.rate:g}, "
            f"row_size={self.row_size}, contexts={len(self)}, nbytes={self.nbytes})"
        )

    def __reduce__(self):
        raise TypeError("a BlendedLookup cannot be pickled; use save() and BlendedLookup.load()")

    @property
    def nbytes(self):
        """Bytes of memory held; never above max_bytes."""
        return self._store.nbytes()

    @property
    def num_evicted(self):
        """Contexts that made room for others so far."""
        return self._store.num_evicted()

    def clear(self):
        """Forget every context and what was learned about their worth; parameters stay."""
        with nogil:
            self._store.mutex.lock()
            try:
                self._store.clear()
            finally:
                self._store.mutex.unlock()

    def learn(self, context, token_ids, rows=None, *, scope=0):
        """Teach a run of tokens, or the laws of a run.

        context: int32[C], the tokens before the first scored position. token_ids: int32[L], the tokens that followed.
        rows: (row_ids int32[L, W], row_probs float32[L, W]), the target's law of each of those tokens, padded with
        id -1, likeliest first; None for one-hots of token_ids. Position i has the context `context + token_ids[:i]`.

        Raises ValueError on negative tokens, wrong shapes, or probabilities that are not in [0, 1].
        """
        cdef uint8_t scope_number = _scope(scope)
        cdef const int32_t[::1] tokens = _vector(token_ids, "token_ids")
        cdef uint32_t window[MAX_WINDOW]
        cdef int32_t available = _fill_window(context, self._store.reach(), window)
        _check_tokens(tokens)
        if tokens.shape[0] == 0:
            return
        if rows is None:
            self._learn_tokens(tokens, window, available, scope_number)
            return
        row_ids, row_probs = _checked_rows(rows[0], rows[1], tokens.shape[0])
        self._learn_rows(tokens, row_ids, row_probs, window, available, scope_number)

    cdef void _learn_tokens(self, const int32_t[::1] tokens, const uint32_t* window, int32_t available,
                            uint8_t scope) except *:
        with nogil:
            self._store.mutex.lock()
            try:
                self._store.clock.scope = scope
                self._store.learn_run(window, available, &tokens[0], tokens.shape[0])
            finally:
                self._store.mutex.unlock()

    cdef void _learn_rows(self, const int32_t[::1] tokens, const int32_t[:, ::1] ids, const float[:, ::1] probs,
                          uint32_t* window, int32_t available, uint8_t scope) except *:
        cdef Py_ssize_t i
        cdef int32_t age
        cdef Cursor cursor
        with nogil:
            self._store.mutex.lock()
            try:
                self._store.clock.scope = scope
                for i in range(tokens.shape[0]):
                    cursor = self._store.locate(window, available)
                    self._store.learn_row(cursor, &ids[i, 0], &probs[i, 0], ids.shape[1])
                    available = min(available + 1, self._store.reach())
                    for age in range(available - 1, 0, -1):
                        window[age] = window[age - 1]
                    window[0] = tokens[i]
            finally:
                self._store.mutex.unlock()

    def learn_batch(self, batch, histories, row_ids, row_probs, nodes=None, *, scopes=None):
        """Teach every scored node of a step.

        batch: DraftBatch with M nodes. histories: per row int32[:], the committed tokens before its pending token.
        row_ids int32[M, W], row_probs float32[M, W]: the target's law after each node, likeliest first, padded with
        id -1. nodes: indices into 0..M-1 to teach, None for all. scopes: one per row, None for 0.

        Raises ValueError on wrong shapes, nodes out of range, or probabilities that are not in [0, 1].
        """
        if len(histories) != len(batch):
            raise ValueError(f"histories must have one entry per row ({len(batch)}), got {len(histories)}")
        row_ids, row_probs = _checked_rows(row_ids, row_probs, batch.num_nodes)
        _check_batch(batch)
        cdef vector[int32_t] windows = vector[int32_t](len(histories) * self._store.reach())
        cdef vector[int32_t] sizes = vector[int32_t](len(histories))
        cdef vector[GrowthRequest] requests
        _fill_windows(histories, self._store.reach(), windows, sizes)
        requests.resize(len(histories))
        for row in range(len(histories)):
            requests[row].window, requests[row].window_size = &windows[row * self._store.reach()], sizes[row]
            requests[row].scope = 0
        if scopes is not None:
            _set_scopes(scopes, requests)
        chosen = _checked_nodes(nodes, batch.num_nodes)
        if len(chosen) > 0:
            self._learn_nodes(batch.token_ids, batch.parents, batch.offsets, requests, chosen, row_ids, row_probs)

    cdef void _learn_nodes(self, const int32_t[::1] token_ids, const int32_t[::1] parents, const int32_t[::1] offsets,
                           const vector[GrowthRequest]& rows, const int64_t[::1] nodes, const int32_t[:, ::1] ids,
                           const float[:, ::1] probs) except *:
        cdef uint32_t window[MAX_WINDOW]
        cdef int32_t available
        cdef int64_t row = 0, node
        cdef Py_ssize_t i
        cdef Cursor cursor
        with nogil:
            self._store.mutex.lock()
            try:
                for i in range(nodes.shape[0]):
                    node = nodes[i]
                    row = 0 if node < offsets[row] else row
                    while node >= offsets[row + 1]:
                        row += 1
                    available = path_window(rows[row], &token_ids[offsets[row]], &parents[offsets[row]],
                                            <int32_t> (node - offsets[row]), self._store.reach(), window)
                    self._store.clock.scope = rows[row].scope
                    cursor = self._store.locate(window, available)
                    self._store.learn_row(cursor, &ids[node, 0], &probs[node, 0], ids.shape[1])
            finally:
                self._store.mutex.unlock()

    def predict(self, context, *, limit=10, scope=0):
        """(token_ids int32[K], probabilities float32[K]): the blended law after a context, K <= limit.

        Tokens come in descending probability (ties: lowest id). What is missing to 1 is unseen or cut.
        """
        cdef uint32_t window[MAX_WINDOW]
        cdef int32_t available = _fill_window(context, self._store.reach(), window)
        cdef uint8_t scope_number = _scope(scope)
        cdef int32_t wanted = limit
        cdef vector[Candidate] law
        with nogil:
            self._store.mutex.lock()
            try:
                law = blended_law(self._store[0], window, available, scope_number, wanted)
            finally:
                self._store.mutex.unlock()
        token_ids = np.array([law[i].token for i in range(law.size())], dtype=np.int32)
        return token_ids, np.array([law[i].probability for i in range(law.size())], dtype=np.float32)

    def draft(self, histories, budget, *, seed, rows, steps, kind="deterministic", floor=0.0, rises=None,
              max_depths=None, scopes=None):
        """One draft per row, as an adapted DraftBatch with path probabilities.

        histories: per row int32[:], the committed tokens with the pending token last. budget: nodes of all rows
        together, pending tokens not counted; they go where acceptance is likeliest. seed, rows int64[B],
        steps int64[B]: the key of the drafting noise, which deterministic drafts have none of. kind: "deterministic"
        (the likeliest tokens), "mixed" (where it pays, one sampled child stands before them) or "sampled" (children
        drawn without replacement). floor: no node that is less likely to be accepted. rises: float32[budget] or None,
        the share of itself by which the step's cost rises with each further node; growth ends where a node adds less to
        the step's expected tokens. max_depths: deepest node per row, None for no bound. scopes: one per row, None
        for 0.

        Raises ValueError on an empty history, an unknown kind, a floor outside [0, 1], or fewer rises than the budget.
        """
        cdef Py_ssize_t num_rows = len(histories), row
        if num_rows == 0:
            raise ValueError("draft needs at least one history, got none")
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
        if not 0 <= budget <= 2**20 or not 0.0 <= floor <= 1.0:
            raise ValueError(f"budget must be in [0, 2**20] and floor in [0, 1], got {budget} and {floor}")
        cdef GrowthSettings settings
        settings.kind = <DraftKind> <int32_t> KINDS.index(kind)
        settings.budget, settings.floor, settings.support_size = budget, floor, self.row_size
        cdef const float[::1] prices
        if rises is not None and budget > 0:
            prices = np.ascontiguousarray(rises, dtype=np.float32)
            if prices.shape[0] < budget:
                raise ValueError(f"rises must hold one entry per node of the budget ({budget}), got {prices.shape[0]}")
            settings.rises = &prices[0]
        cdef const uint64_t[::1] keys
        cdef vector[int32_t] windows = vector[int32_t](num_rows * self._store.reach())
        cdef vector[int32_t] sizes = vector[int32_t](num_rows)
        _fill_windows(histories, self._store.reach(), windows, sizes)
        cdef vector[GrowthRequest] requests
        requests.resize(num_rows)
        for row in range(num_rows):
            if sizes[row] == 0:
                raise ValueError("every history must end with the pending token, got an empty one")
            requests[row].window, requests[row].window_size = &windows[row * self._store.reach()], sizes[row]
            requests[row].max_depth, requests[row].scope, requests[row].key = NO_BOUND, 0, 0
        if kind != "deterministic":
            keys = _step_keys(seed, rows, steps, num_rows)
            for row in range(num_rows):
                requests[row].key = keys[row]
        if max_depths is not None:
            _set_depths(max_depths, requests)
        if scopes is not None:
            _set_scopes(scopes, requests)
        return self._grow(requests, settings)

    cdef object _grow(self, const vector[GrowthRequest]& requests, const GrowthSettings& settings):
        with nogil:
            self._store.mutex.lock()
        try:
            with nogil:
                self._growth.grow(self._store[0], requests, settings)
            batch = _batch(self._growth)
        finally:
            self._store.mutex.unlock()
        return batch

    def record_outcome(self, batch, accepted, next_tokens, *, kind):
        """Teach what became of a draft, so that path probabilities come true as often as they say.

        batch: a DraftBatch of `draft`, of any earlier step. accepted: per row int32[:], the accepted path as row-local
        nodes, root excluded. next_tokens: int32[B], the token that followed each path, NO_TOKEN where it is unknown.
        kind: as the draft was asked for; each kind is counted apart. Every call counts: record a draft once.

        Raises ValueError where the batch has no path_estimates or is unsound, where a path does not lead from its root
        down, for wrong lengths, and for an unknown kind.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {kind!r}; say what the draft was asked for")
        cdef const float[::1] estimates = _checked_estimates(batch)
        _check_batch(batch)
        cdef const int32_t[::1] token_ids = batch.token_ids, parents = batch.parents, offsets = batch.offsets
        cdef const int32_t[::1] next_ids = _vector(next_tokens, "next_tokens")
        cdef Py_ssize_t num_rows = len(batch)
        if len(accepted) != num_rows or next_ids.shape[0] != num_rows:
            raise ValueError(
                f"accepted and next_tokens must have one entry per row of the batch ({num_rows}), "
                f"got {len(accepted)} and {next_ids.shape[0]}"
            )
        paths = [_vector(path, "accepted") for path in accepted]
        cdef const int32_t[::1] nodes = np.concatenate(paths)
        cdef const int64_t[::1] ends = np.cumsum([0, *map(len, paths)])
        cdef Outcome outcome
        outcome.token_ids, outcome.parents, outcome.offsets = &token_ids[0], &parents[0], &offsets[0]
        outcome.estimates, outcome.next_tokens, outcome.accepted_ends = &estimates[0], &next_ids[0], &ends[0]
        outcome.accepted = &nodes[0] if nodes.shape[0] else NULL
        outcome.num_rows = num_rows
        cdef int64_t broken = first_broken_path(outcome)
        if broken >= 0:
            raise ValueError(
                f"accepted[{broken}] must be a path of nodes from a child of the root down, "
                f"got {paths[broken].tolist()}; leave out the root"
            )
        cdef int32_t kind_number = KINDS.index(kind)
        with nogil:
            self._store.mutex.lock()
            try:
                c_record_outcome(outcome, self._store.calibrations[kind_number])
            finally:
                self._store.mutex.unlock()

    def check(self):
        """Raise RuntimeError where an invariant of the store is broken; for tests."""
        cdef const char* fault = self._store.find_fault()
        if fault != NULL:
            raise RuntimeError(f"the store must be sound, got {fault.decode()}")

    def save(self, path):
        """Write to a file: atomic, an existing file stays whole until the new one is complete. Raises OSError.

        Ages and scopes are not kept: what is loaded counts as learned elsewhere.
        """
        cdef StoreImage image
        with nogil:
            self._store.mutex.lock()
            try:
                take_image(self._store[0], image)
            finally:
                self._store.mutex.unlock()
        write_store_file(path, self._parameters(), {
            "roots": _uint32(image.roots), "sizes": _uint8(image.sizes), "visits": _uint8(image.visits),
            "tokens": _uint32(image.tokens), "weights": _uint16(image.weights),
            "has_child": _uint8(image.has_child), "odds": _float32(image.odds),
        })

    @classmethod
    def load(cls, path, *, fingerprint=None, max_bytes=None):
        """Read a file written by `save`.

        fingerprint: the vocabulary that the file must be of; None accepts any. max_bytes: another cap than the file's.
        Raises LookupFileError where the file is damaged, newer, of another vocabulary, or too large for the cap;
        OSError where unreadable.
        """
        parameters, arrays = read_store_file(path, num_odds=C_NUM_ODDS, fingerprint=fingerprint)
        if max_bytes is not None:
            parameters["max_bytes"] = max_bytes
        cdef BlendedLookup lookup
        try:
            lookup = cls(**parameters)
        except (ValueError, OverflowError) as error:
            raise LookupFileError(f"{path} must hold sound parameters, got {parameters}; build it again") from error
        lookup._restore(path, arrays)
        return lookup

    def _parameters(self):
        return {
            "depth": self.depth,
            "max_bytes": self.max_bytes,
            "fade": self.fade,
            "rate": self.rate,
            "row_size": self.row_size,
            "fingerprint": self.fingerprint,
        }

    cdef void _restore(self, path, arrays) except *:
        cdef ImageView view
        cdef const uint32_t[::1] roots = arrays["roots"], tokens = arrays["tokens"]
        cdef const uint8_t[::1] sizes = arrays["sizes"], visits = arrays["visits"], has_child = arrays["has_child"]
        cdef const uint16_t[::1] weights = arrays["weights"]
        cdef const float[::1] odds = arrays["odds"]
        cdef StoreReader* reader
        cdef Restored restored
        view.num_roots, view.num_contexts, view.num_entries = roots.shape[0], sizes.shape[0], tokens.shape[0]
        if roots.shape[0]:
            view.roots = &roots[0]
        if sizes.shape[0]:
            view.sizes, view.visits = &sizes[0], &visits[0]
        if tokens.shape[0]:
            view.tokens, view.weights, view.has_child = &tokens[0], &weights[0], &has_child[0]
        view.odds = &odds[0]
        reader = new StoreReader(view, self._store[0])
        try:
            restored = reader.read()
        finally:
            del reader
        if restored == Restored.too_large:
            raise LookupFileError(
                f"{path} must fit into max_bytes={self.max_bytes}, got more; load it with a larger cap"
            )
        if restored == Restored.damaged:
            raise LookupFileError(f"{path} must hold sound contexts, got a broken one; build it again")


cdef int32_t _fill_window(history, int32_t num_tokens, uint32_t* window) except -1:
    """The last tokens of a history, newest first; returns how many.

    Arrays are read directly: a typed view would take longer than a small draft.
    """
    cdef int32_t size, age
    cdef const int32_t* end
    if not cnp.PyArray_Check(history) or not _is_run(history):
        history = _tail(history, num_tokens)
    size = <int32_t> min(num_tokens, cnp.PyArray_DIM(history, 0))
    end = <const int32_t*> cnp.PyArray_DATA(history) + cnp.PyArray_DIM(history, 0)
    for age in range(size):
        if end[-1 - age] < 0:
            raise ValueError("token ids must not be negative; pass the tokens without padding")
        window[age] = end[-1 - age]
    return size


cdef bool_t _is_run(cnp.ndarray tokens):
    """Is this int32[:], one after the other in memory?"""
    cdef bool_t is_int32 = cnp.PyArray_TYPE(tokens) == cnp.NPY_INT32
    return is_int32 and cnp.PyArray_NDIM(tokens) == 1 and cnp.PyArray_ISCARRAY_RO(tokens)


cdef void _fill_windows(histories, int32_t num_tokens, vector[int32_t]& windows, vector[int32_t]& sizes) except *:
    """windows[B * num_tokens], newest first, and how many tokens of each are filled."""
    cdef Py_ssize_t row
    for row in range(<Py_ssize_t> sizes.size()):
        sizes[row] = _fill_window(histories[row], num_tokens, <uint32_t*> &windows[row * num_tokens])


cdef uint8_t _scope(scope) except? 255:
    cdef int64_t number
    try:
        number = scope
    except OverflowError:
        number = -1
    if not 0 <= number <= LAST_SCOPE:
        raise ValueError(f"scope must be in [0, {MAX_SCOPE}], got {scope}; take the number modulo {MAX_SCOPE + 1}")
    return <uint8_t> number


cdef void _set_scopes(scopes, vector[GrowthRequest]& requests) except *:
    cdef size_t row
    if len(scopes) != <Py_ssize_t> requests.size():
        raise ValueError(f"scopes must hold one number per row ({requests.size()}), got {len(scopes)}")
    for row in range(requests.size()):
        requests[row].scope = _scope(scopes[row])


cdef void _set_depths(max_depths, vector[GrowthRequest]& requests) except *:
    cdef size_t row
    if len(max_depths) != <Py_ssize_t> requests.size() or min(max_depths) < 0:
        raise ValueError(f"max_depths must hold one number >= 0 per row ({requests.size()}), got {max_depths}")
    for row in range(requests.size()):
        requests[row].max_depth = min(max_depths[row], NO_BOUND)


def _checked_estimates(batch):
    estimates = batch.path_estimates
    if estimates is None:
        raise ValueError("batch must have path_estimates, got None; only drafts of a BlendedLookup have an outcome to it")
    estimates = np.ascontiguousarray(estimates, dtype=np.float32)
    if estimates.shape != (batch.num_nodes,) or not ((estimates >= 0) & (estimates <= LARGEST_ESTIMATE)).all():
        raise ValueError(f"path_estimates must be {batch.num_nodes} numbers in [0, 1], got {estimates}")
    return estimates


cdef object _batch(Growth& growth):
    """The grown nodes as a DraftBatch: parts of one array, because making many costs more than filling them."""
    cdef Py_ssize_t num_rows = growth.row_sizes.size(), row, num_nodes = 0
    cdef int32_t width = growth.width()
    for row in range(num_rows):
        num_nodes += growth.row_sizes[row]
    cdef Py_ssize_t num_cells = width * num_nodes
    cdef cnp.npy_intp size = num_rows + 1 + 6 * num_nodes + 2 * num_cells
    cdef cnp.ndarray numbers = cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT32)
    cdef int32_t* offsets = <int32_t*> cnp.PyArray_DATA(numbers)
    cdef GrowthSink sink
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
    growth.write(sink)
    # Past its own constructor, which takes a microsecond more.
    batch = DraftBatch.__new__(DraftBatch)
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


cdef object _uint32(vector[uint32_t]& values):
    return np.array(<uint32_t[:values.size()]> values.data()) if values.size() else np.empty(0, np.uint32)


cdef object _uint16(vector[uint16_t]& values):
    return np.array(<uint16_t[:values.size()]> values.data()) if values.size() else np.empty(0, np.uint16)


cdef object _uint8(vector[uint8_t]& values):
    return np.array(<uint8_t[:values.size()]> values.data()) if values.size() else np.empty(0, np.uint8)


cdef object _float32(vector[float]& values):
    return np.array(<float[:values.size()]> values.data()) if values.size() else np.empty(0, np.float32)
