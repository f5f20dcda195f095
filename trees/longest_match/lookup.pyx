"""The lookup tree: what followed each context, with probabilities. Drafts come from it, every step teaches it.

The work is done in C++ (lookup.h, teacher.h, drafter.h, noise.h) without the interpreter's lock; this file checks
arguments and owns memory.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libcpp cimport bool as bool_t
from libcpp.vector cimport vector

import numpy as np

from stand.trees.draft import NO_TOKEN, DraftBatch
from stand.trees.longest_match.file import LookupFileError, read_lookup_file, write_lookup_file

cdef extern from "../noise.h" namespace "stand" nogil:
    const uint64_t DRAFT_STREAM
    const uint64_t TARGET_STREAM
    uint64_t stream_key(uint64_t seed, uint64_t stream)
    uint64_t step_key(uint64_t stream_key, uint64_t row, uint64_t step)
    double uniform(uint64_t step_key, uint64_t node, uint64_t slot)

cdef extern from "table.h" namespace "stand" nogil:
    cdef cppclass Row:
        const int32_t* token_ids
        const float* probabilities
        int32_t size
        int32_t order
        uint32_t count

    cdef cppclass OrderTable:
        int32_t order
        vector[int32_t] keys
        vector[uint32_t] counts
        vector[int32_t] row_ids
        vector[float] row_probs
        int64_t size()

    cdef cppclass Lookup:
        Lookup(const vector[int32_t]& orders, int32_t row_size, double min_rate) except +
        vector[OrderTable] tables
        int32_t max_order()
        int64_t size()
        int64_t nbytes()
        void clear() except +
        void assign(const Lookup& other) except +
        Row copy_longest(const int32_t* window, int32_t available, int32_t floor_order, vector[int32_t]& token_ids,
                         vector[float]& probabilities) except +

    bool_t restore_table(OrderTable& table, int64_t num_contexts, const int32_t* keys, const uint32_t* counts,
                         const int32_t* row_ids, const float* row_probs) except +

cdef extern from "learning.h" namespace "stand" nogil:
    cdef cppclass StepView:
        const int32_t* token_ids
        const int32_t* parents
        const int32_t* offsets
        int64_t num_rows
        const int32_t* windows
        const int32_t* window_sizes

    int64_t first_bad_entry(const int32_t* ids, const float* probs, int64_t num_entries)
    int64_t first_negative(const int32_t* values, int64_t num_values)
    void learn_run(Lookup& lookup, const int32_t* tokens, int64_t num_before, int64_t num_scored,
                   const int32_t* ids, const float* probs, int32_t width) except +
    void learn_nodes(Lookup& lookup, const StepView& step, const int64_t* nodes, int64_t num_nodes,
                     const int32_t* ids, const float* probs, int32_t width) except +

cdef extern from "fill_shape.h" namespace "stand" nogil:
    cdef enum class DraftKind(int32_t):
        sampled
        mixed
        deterministic
        coupled
        independent

    cdef cppclass Children:
        vector[int32_t] picks
        vector[float] laws

    cdef cppclass ShapeView:
        const int32_t* parents
        int32_t num_slots

    cdef cppclass DraftSink:
        int32_t* token_ids
        int32_t* parents
        int32_t* depths
        int32_t* ranks
        int32_t* slots
        int32_t* support_ids
        float* law
        int64_t num_nodes

    cdef cppclass DraftRequest:
        DraftKind kind
        int32_t floor_order
        const int32_t* window
        int32_t window_size
        uint64_t key
        uint64_t target_key
        uint64_t row
        uint64_t position

    bool_t shape_is_sound(const ShapeView& shape)
    void c_draw_children "stand::draw_children"(DraftKind kind, const float* probabilities, const double* uniforms,
                                                int32_t size, int32_t num_children, Children& children) except +
    void draft_rows(const Lookup& lookup, const vector[ShapeView]& shapes, const vector[DraftRequest]& requests,
                    DraftSink& sink) except +

MAX_ORDER = 16
MAX_ROW_SIZE = 256
KINDS = ("sampled", "mixed", "deterministic")
SHAPED_KINDS = (*KINDS, "coupled", "independent")
_LARGEST_WORD = 2**32 - 1
_LARGEST_POSITION = 2**31  # with room for the deepest draft below 2**32


cdef class LookupTree:
    """Context -> the likeliest next tokens, their probabilities and how often the context was observed.

    `orders`: context lengths in tokens, ascending, within 1..16. `row_size` (S): candidates kept per context.
    `min_rate`: the weight of a new observation is max(1 / (count + 1), min_rate); 0 gives STAND's plain average
    (STAND, section 3.1), larger values let old evidence fade. `fingerprint`: identifies the vocabulary (see
    `vocabulary_fingerprint`), stored in saved files.

    Raises ValueError on bad arguments. Verbs may be called from several threads; each is atomic.
    """

    cdef Lookup* _lookup
    cdef readonly tuple orders
    cdef readonly int row_size
    cdef readonly double min_rate
    cdef readonly bytes fingerprint

    def __cinit__(self, *, orders=(1, 2, 3, 4), row_size=10, min_rate=0.1, fingerprint=b""):
        self._lookup = NULL
        self.orders = _checked_orders(orders)
        if not 1 <= row_size <= MAX_ROW_SIZE:
            raise ValueError(f"row_size must be in [1, {MAX_ROW_SIZE}], got {row_size}; 10 is usual")
        if not 0.0 <= min_rate <= 1.0:
            raise ValueError(f"min_rate must be in [0, 1], got {min_rate}; 0 is the plain average, 0.1 is usual")
        if not isinstance(fingerprint, bytes):
            raise ValueError(f"fingerprint must be bytes, got {fingerprint!r}; use vocabulary_fingerprint()")
        self.row_size = row_size
        self.min_rate = min_rate
        self.fingerprint = fingerprint
        self._lookup = new Lookup(self.orders, self.row_size, self.min_rate)

    def __dealloc__(self):
        del self._lookup

    def __len__(self):
        """Number of contexts, all orders together."""
        return self._lookup.size()

    def __repr__(self):
        return (
            f"LookupTree(orders={self.orders}, row_size={self.row_size}, min_rate={self.min_rate:g}, "
            f"contexts={len(self)}, nbytes={self.nbytes})"
        )

    def __reduce__(self):
        raise TypeError("a LookupTree cannot be pickled; use save() and LookupTree.load()")

    @property
    def nbytes(self):
        """Bytes of memory held by the tables."""
        return self._lookup.nbytes()

    def clear(self):
        """Forget everything; parameters stay."""
        self._lookup.clear()

    def copy(self):
        """An independent lookup tree with the same content."""
        cdef LookupTree twin = LookupTree(**self._parameters())
        twin._lookup.assign(self._lookup[0])
        return twin

    def learn(self, context, token_ids, rows=None):
        """Teach the laws of a run of tokens.

        context: int32[C], the tokens before the first scored position. token_ids: int32[L], the tokens that followed.
        rows: (row_ids int32[L, W], row_probs float32[L, W]), the target's law of each of those tokens, padded with
        id -1; None for one-hots of token_ids. Position i has the context `context + token_ids[:i]`. A row without
        positive mass is skipped.

        Raises ValueError on negative tokens, wrong shapes, or probabilities that are not in [0, 1].
        """
        cdef const int32_t[::1] before = _tail(context, self._lookup.max_order())
        after = _vector(token_ids, "token_ids")
        cdef const int32_t[::1] tokens = np.concatenate([before, after])
        cdef int64_t num_before = before.shape[0], num_scored = tokens.shape[0] - before.shape[0]
        if num_scored == 0:
            return
        _check_tokens(tokens)
        if rows is None:
            with nogil:
                learn_run(self._lookup[0], &tokens[0], num_before, num_scored, NULL, NULL, 0)
            return
        row_ids, row_probs = _checked_rows(rows[0], rows[1], num_scored)
        cdef const int32_t[:, ::1] ids = row_ids
        cdef const float[:, ::1] probs = row_probs
        cdef int32_t width = ids.shape[1]
        with nogil:
            learn_run(self._lookup[0], &tokens[0], num_before, num_scored, &ids[0, 0], &probs[0, 0], width)

    def learn_batch(self, batch, histories, row_ids, row_probs, nodes=None):
        """Teach every scored node of a step.

        batch: DraftBatch with M nodes. histories: per row int32[:], the committed tokens before its pending token.
        row_ids int32[M, W], row_probs float32[M, W]: the target's law after each node, padded with id -1.
        nodes: indices into 0..M-1 to teach, None for all. Node i's context is its row's history plus the path from
        the root to i, inclusive.

        Raises ValueError on wrong shapes, nodes out of range, or probabilities that are not in [0, 1].
        """
        if len(histories) != len(batch):
            raise ValueError(f"histories must have one entry per row ({len(batch)}), got {len(histories)}")
        row_ids, row_probs = _checked_rows(row_ids, row_probs, batch.num_nodes)
        windows, sizes = _windows(histories, self._lookup.max_order())
        cdef const int64_t[::1] chosen = _checked_nodes(nodes, batch.num_nodes)
        _check_batch(batch)
        cdef const int32_t[::1] token_ids = batch.token_ids, parents = batch.parents, offsets = batch.offsets
        cdef const int32_t[:, ::1] window_view = windows
        cdef const int32_t[::1] size_view = sizes
        cdef const int32_t[:, ::1] ids = row_ids
        cdef const float[:, ::1] probs = row_probs
        cdef int32_t width = ids.shape[1]
        cdef StepView step
        if chosen.shape[0] == 0:
            return
        step.token_ids, step.parents, step.offsets = &token_ids[0], &parents[0], &offsets[0]
        step.num_rows = offsets.shape[0] - 1
        step.windows, step.window_sizes = &window_view[0, 0], &size_view[0]
        with nogil:
            learn_nodes(self._lookup[0], step, &chosen[0], chosen.shape[0], &ids[0, 0], &probs[0, 0], width)

    def lookup(self, context, *, floor_order=1):
        """(order, token_ids int32[K], probabilities float32[K], count) of the longest known context, or None.

        Tokens come in descending probability (ties: lowest id). Probabilities are as stored: a row that was cut to
        the best S sums to less than 1.
        """
        self._check_floor(floor_order)
        cdef const int32_t[::1] tail = _tail(context, self._lookup.max_order())[::-1].copy()
        if tail.shape[0] == 0:
            return None
        cdef vector[int32_t] token_ids
        cdef vector[float] probabilities
        cdef Row row = self._lookup.copy_longest(&tail[0], tail.shape[0], floor_order, token_ids, probabilities)
        if row.size == 0:
            return None
        return row.order, np.array(token_ids, np.int32), np.array(probabilities, np.float32), row.count

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
        if kind not in SHAPED_KINDS:
            raise ValueError(f"kind must be one of {SHAPED_KINDS}, got {kind!r}")
        shapes = [shape] * len(histories) if hasattr(shape, "parents") else list(shape)
        keys = _step_keys(seed, rows, steps, len(histories))
        if len(histories) == 0 or len(shapes) != len(histories):
            raise ValueError(f"draft needs one history and one shape per row, got {len(histories)} and {len(shapes)}")
        windows, sizes = _windows(histories, self._lookup.max_order())
        if not sizes.all():
            raise ValueError("every history must end with the pending token, got an empty one; pass at least one token")
        cdef vector[ShapeView] shape_views = _shape_views(shapes)
        cdef vector[DraftRequest] requests = _requests(SHAPED_KINDS.index(kind), floor_order, windows, sizes, keys)
        if kind == "coupled":
            _share_noise(requests, seed, rows, list(map(len, histories)) if positions is None else positions)
        cdef int64_t room = 0
        cdef size_t index
        for index in range(shape_views.size()):
            room += shape_views[index].num_slots
        arrays = _empty_arrays(room, self.row_size)
        cdef DraftSink sink = _sink(arrays)
        with nogil:
            draft_rows(self._lookup[0], shape_views, requests, sink)
        return _batch(arrays, sink.num_nodes, len(histories), adapted=kind != "coupled")

    def save(self, path):
        """Write to a file: atomic, an existing file stays whole until the new one is complete. Raises OSError."""
        cdef LookupTree snapshot = self.copy()
        write_lookup_file(path, self._parameters(), snapshot._table_views())

    @classmethod
    def load(cls, path, *, fingerprint=None):
        """Read a file written by `save`.

        fingerprint: the vocabulary that the file must be of; None accepts any.
        Raises LookupFileError where the file is damaged, newer, or of another vocabulary; OSError where unreadable.
        """
        parameters, tables = read_lookup_file(path, fingerprint=fingerprint)
        cdef LookupTree lookup
        try:
            lookup = cls(**parameters)
        except ValueError as error:
            raise LookupFileError(f"{path} must hold sound parameters, got {parameters}; build it again") from error
        lookup._restore(path, tables)
        return lookup

    def _check_floor(self, floor_order):
        if not 1 <= floor_order <= MAX_ORDER:
            raise ValueError(f"floor_order must be in [1, {MAX_ORDER}], got {floor_order}")

    def _parameters(self):
        return {
            "orders": list(self.orders),
            "row_size": self.row_size,
            "min_rate": self.min_rate,
            "fingerprint": self.fingerprint,
        }

    cdef list _table_views(self):
        """Per order: (keys int32[n, order], counts uint32[n], row_ids int32[n, S], row_probs float32[n, S]), valid as
        long as this lookup tree lives and is not taught."""
        cdef size_t index
        cdef OrderTable* table
        views = []
        for index in range(self._lookup.tables.size()):
            table = &self._lookup.tables[index]
            known = table.size() > 0
            views.append(_views_of(table, self.row_size) if known else _empty_table(table.order, self.row_size))
        return views

    cdef void _restore(self, path, tables) except *:
        cdef const int32_t[:, ::1] keys
        cdef const uint32_t[::1] counts
        cdef const int32_t[:, ::1] row_ids
        cdef const float[:, ::1] row_probs
        cdef size_t index
        cdef bool_t sound
        for index, table in enumerate(tables):
            keys, counts, row_ids, row_probs = table
            if counts.shape[0] == 0:
                continue
            with nogil:
                sound = restore_table(self._lookup.tables[index], counts.shape[0], &keys[0, 0], &counts[0],
                                      &row_ids[0, 0], &row_probs[0, 0])
            if not sound:
                raise LookupFileError(
                    f"{path} must hold sound contexts, got a broken one of order {self.orders[index]}; build it again"
                )


cdef tuple _views_of(OrderTable* table, int row_size):
    cdef int64_t num_contexts = table.size()
    return (
        np.asarray(<int32_t[:num_contexts, :table.order]> table.keys.data()),
        np.asarray(<uint32_t[:num_contexts]> table.counts.data()),
        np.asarray(<int32_t[:num_contexts, :row_size]> table.row_ids.data()),
        np.asarray(<float[:num_contexts, :row_size]> table.row_probs.data()),
    )


def _empty_table(order, row_size):
    return (
        np.empty((0, order), np.int32),
        np.empty(0, np.uint32),
        np.empty((0, row_size), np.int32),
        np.empty((0, row_size), np.float32),
    )


def fill_uniforms(uint64_t seed, uint64_t stream, const int64_t[::1] rows not None, const int64_t[::1] steps not None,
                  const int64_t[::1] nodes not None, int64_t slot, double[::1] out not None):
    """out[i] = the uniform of (seed, stream, rows[i], steps[i], nodes[i], slot); False if a word is out of range."""
    cdef Py_ssize_t i
    cdef uint64_t key = stream_key(seed, stream), words = <uint64_t> slot
    cdef Py_ssize_t num_values = out.shape[0]
    if rows.shape[0] != num_values or steps.shape[0] != num_values or nodes.shape[0] != num_values:
        raise ValueError("rows, steps and nodes must be as long as out; broadcast them first")
    for i in range(num_values):
        words |= <uint64_t> rows[i] | <uint64_t> steps[i] | <uint64_t> nodes[i]
        out[i] = uniform(step_key(key, rows[i], steps[i]), nodes[i], slot)
    return words <= <uint64_t> _LARGEST_WORD


def draw_children(kind, const float[::1] probabilities not None, const double[::1] uniforms not None, num_children):
    """(picks int32[K], laws float32[K, S]): children of one row, given its noise; for tests and tools.

    probabilities: a row in descending order, all positive. uniforms: one number in (0, 1) per candidate.
    """
    cdef Children children
    cdef int32_t size = probabilities.shape[0]
    if size == 0 or uniforms.shape[0] != size:
        raise ValueError(f"uniforms must match probabilities and not be empty, got {uniforms.shape[0]} for {size}")
    cdef DraftKind wanted = <DraftKind> <int32_t> KINDS.index(kind)
    c_draw_children(wanted, &probabilities[0], &uniforms[0], size, num_children, children)
    picks = np.array([children.picks[i] for i in range(children.picks.size())], dtype=np.int32)
    laws = np.array([children.laws[i] for i in range(children.laws.size())], dtype=np.float32)
    return picks, laws.reshape(len(picks), size)


def _checked_orders(orders):
    orders = tuple(int(order) for order in orders)
    ascending = all(low < high for low, high in zip(orders, orders[1:]))
    if len(orders) == 0 or not ascending or orders[0] < 1 or orders[len(orders) - 1] > MAX_ORDER:
        raise ValueError(f"orders must be ascending and within 1..{MAX_ORDER}, got {orders}; (1, 2, 3, 4) is usual")
    return orders


def _vector(values, name):
    array = np.ascontiguousarray(values, dtype=np.int32)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    return array


def _tail(tokens, num_tokens):
    """The last tokens of a history, without converting the rest of it."""
    return _vector(tokens[max(0, len(tokens) - num_tokens):], "context")


def _check_tokens(const int32_t[::1] tokens):
    if tokens.shape[0] > 0 and first_negative(&tokens[0], tokens.shape[0]) >= 0:
        raise ValueError("token ids must not be negative; pass the tokens without padding")


def _checked_rows(row_ids, row_probs, num_rows):
    cdef const int32_t[:, ::1] ids = np.ascontiguousarray(row_ids, dtype=np.int32)
    cdef const float[:, ::1] probs = np.ascontiguousarray(row_probs, dtype=np.float32)
    if ids.shape[0] != num_rows or probs.shape[0] != num_rows or ids.shape[1] != probs.shape[1] or ids.shape[1] == 0:
        raise ValueError(
            f"rows must be two [{num_rows}, W] arrays with W > 0, got ({ids.shape[0]}, {ids.shape[1]}) "
            f"and ({probs.shape[0]}, {probs.shape[1]})"
        )
    if num_rows > 0 and first_bad_entry(&ids[0, 0], &probs[0, 0], ids.shape[0] * ids.shape[1]) >= 0:
        raise ValueError("rows must hold ids >= -1 and probabilities in [0, 1]; pad with id -1 and probability 0")
    return ids.base, probs.base


def _checked_nodes(nodes, num_nodes):
    if nodes is None:
        return np.arange(num_nodes, dtype=np.int64)
    nodes = np.ascontiguousarray(nodes, dtype=np.int64)
    if nodes.ndim != 1 or np.any(nodes < 0) or np.any(nodes >= num_nodes):
        raise ValueError(f"nodes must be a list of indices in [0, {num_nodes}), got {nodes.tolist()}")
    return nodes


def _check_batch(batch):
    cdef const int32_t[::1] token_ids = batch.token_ids, parents = batch.parents, offsets = batch.offsets
    cdef int64_t num_rows = offsets.shape[0] - 1, row, node
    cdef bool_t sound = parents.shape[0] == token_ids.shape[0] and offsets[0] == 0
    sound = sound and offsets[num_rows] == token_ids.shape[0]
    for row in range(num_rows if sound else 0):
        sound = sound and offsets[row] < offsets[row + 1] <= token_ids.shape[0]
        sound = sound and token_ids[offsets[row]] >= 0 and parents[offsets[row]] == -1
        for node in range(offsets[row] + 1, offsets[row + 1] if sound else 0):
            sound = sound and token_ids[node] >= 0 and 0 <= parents[node] < node - offsets[row]
    if not sound:
        raise ValueError("batch must be a sound DraftBatch (tokens >= 0, parents before children); see batch.check()")


def _windows(histories, num_tokens):
    """(int32[B, num_tokens] newest first, int32[B] how many of them are filled)."""
    windows = np.full((len(histories), num_tokens), NO_TOKEN, dtype=np.int32)
    sizes = np.zeros(len(histories), dtype=np.int32)
    for row, history in enumerate(histories):
        tail = _tail(history, num_tokens)
        sizes[row] = len(tail)
        windows[row, : len(tail)] = tail[::-1]
        _check_tokens(tail)
    return windows, sizes


def _step_keys(seed, rows, steps, num_rows):
    cdef const int64_t[::1] row_numbers = np.ascontiguousarray(rows, dtype=np.int64)
    cdef const int64_t[::1] step_numbers = np.ascontiguousarray(steps, dtype=np.int64)
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")
    if row_numbers.shape[0] != num_rows or step_numbers.shape[0] != num_rows:
        raise ValueError(f"rows and steps must hold one number per history ({num_rows}); they key the noise")
    keys = np.empty(num_rows, dtype=np.uint64)
    cdef uint64_t[::1] key_view = keys
    cdef uint64_t words = 0, key = stream_key(seed, DRAFT_STREAM)
    cdef Py_ssize_t row
    for row in range(num_rows):
        words |= <uint64_t> row_numbers[row] | <uint64_t> step_numbers[row]
        key_view[row] = step_key(key, row_numbers[row], step_numbers[row])
    if words > <uint64_t> _LARGEST_WORD:
        raise ValueError("rows and steps must be in [0, 2**32)")
    return keys


cdef vector[ShapeView] _shape_views(list shapes) except *:
    cdef vector[ShapeView] views
    cdef ShapeView view
    cdef const int32_t[::1] parents
    for shape in shapes:
        parents = shape.parents
        if parents.shape[0] == 0:
            raise ValueError("a shape must hold at least the root, got no slot; use TreeShape.empty()")
        view.parents, view.num_slots = &parents[0], parents.shape[0]
        if not shape_is_sound(view):
            raise ValueError("a shape must have parents[0] = -1 and 0 <= parents[i] < i; see TreeShape.check()")
        views.push_back(view)
    return views


cdef vector[DraftRequest] _requests(int32_t kind, int32_t floor_order, const int32_t[:, ::1] windows,
                                    const int32_t[::1] sizes, const uint64_t[::1] keys) except *:
    cdef vector[DraftRequest] requests
    cdef DraftRequest request
    cdef Py_ssize_t row
    request.kind, request.floor_order = <DraftKind> kind, floor_order
    for row in range(windows.shape[0]):
        request.window, request.window_size, request.key = &windows[row, 0], sizes[row], keys[row]
        requests.push_back(request)
    return requests


cdef void _share_noise(vector[DraftRequest]& requests, uint64_t seed, rows, positions) except *:
    """Give every request the key of the noise that the verifier draws its row's next tokens with."""
    cdef const int64_t[::1] row_numbers = np.ascontiguousarray(rows, dtype=np.int64)
    cdef const int64_t[::1] first_positions = np.ascontiguousarray(positions, dtype=np.int64)
    cdef size_t row
    if first_positions.shape[0] != <Py_ssize_t> requests.size():
        raise ValueError(f"positions must hold one number per history ({requests.size()}); they key the noise")
    for row in range(requests.size()):
        if not 0 <= first_positions[row] < _LARGEST_POSITION:
            raise ValueError(f"positions must be in [0, 2**31), got {first_positions[row]}; count tokens from 0")
        requests[row].target_key = stream_key(seed, TARGET_STREAM)
        requests[row].row, requests[row].position = row_numbers[row], first_positions[row]


def _empty_arrays(room, row_size):
    return {
        "token_ids": np.empty(room, dtype=np.int32),
        "parents": np.empty(room, dtype=np.int32),
        "depths": np.empty(room, dtype=np.int32),
        "ranks": np.empty(room, dtype=np.int32),
        "slots": np.empty(room, dtype=np.int32),
        "support_ids": np.full((room, row_size), NO_TOKEN, dtype=np.int32),
        "law": np.zeros((room, row_size), dtype=np.float32),
    }


cdef DraftSink _sink(dict arrays) except *:
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


def _batch(arrays, num_nodes, num_rows, adapted):
    filled = {name: array[:num_nodes] for name, array in arrays.items()}
    roots = np.flatnonzero(filled["parents"] < 0)
    offsets = np.append(roots, num_nodes).astype(np.int32)
    if len(offsets) != num_rows + 1:
        raise AssertionError("a draft must have one root per row")
    return DraftBatch(offsets=offsets, adapted=adapted, **filled)
