"""Which rows of a step go on a text of an earlier step: `KnownTexts` where an engine gives rows without names,
`NamedTexts` where it names them."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcmp, memcpy

from collections import OrderedDict

import numpy as np

cdef enum:
    TAIL = 16  # tokens by which a text is known again, together with its length


cdef struct Texts:
    const int32_t* tokens
    const int64_t* rows
    const int64_t* lengths
    int64_t width
    Py_ssize_t num_texts


cdef Texts texts_of(cnp.ndarray tokens, cnp.ndarray rows, cnp.ndarray lengths) except *:
    """tokens int32[R, L], rows and lengths int64[B], valid as long as they live. Typed views would take longer than
    what is done with them."""
    cdef Texts texts
    if not (
        cnp.PyArray_TYPE(tokens) == cnp.NPY_INT32 and cnp.PyArray_NDIM(tokens) == 2
        and cnp.PyArray_ISCARRAY_RO(tokens) and is_numbers(rows) and is_numbers(lengths)
        and cnp.PyArray_DIM(rows, 0) == cnp.PyArray_DIM(lengths, 0)
    ):
        raise ValueError(
            f"tokens must be int32[R, L], rows and lengths int64[B], all C-contiguous, got {tokens.dtype} of shape "
            f"{(<object> tokens).shape}, {rows.dtype} and {lengths.dtype}"
        )
    texts.tokens, texts.width = <const int32_t*> cnp.PyArray_DATA(tokens), cnp.PyArray_DIM(tokens, 1)
    texts.rows, texts.lengths = <const int64_t*> cnp.PyArray_DATA(rows), <const int64_t*> cnp.PyArray_DATA(lengths)
    texts.num_texts = cnp.PyArray_DIM(rows, 0)
    cdef Py_ssize_t place
    for place in range(texts.num_texts):
        if not (0 <= texts.rows[place] < cnp.PyArray_DIM(tokens, 0) and 0 <= texts.lengths[place] <= texts.width):
            raise ValueError(
                f"rows and lengths must lie in tokens, of shape {(<object> tokens).shape}, got row {texts.rows[place]} "
                f"with {texts.lengths[place]} tokens; pass the array that holds them"
            )
    return texts


cdef bint is_numbers(cnp.ndarray numbers):
    cdef bint is_int64 = cnp.PyArray_TYPE(numbers) == cnp.NPY_INT64
    return is_int64 and cnp.PyArray_NDIM(numbers) == 1 and cnp.PyArray_ISCARRAY_RO(numbers)


cdef class KnownTexts:
    """The texts that lay in an array's rows at the last step, and those that left it since, by length and last tokens.

    Each has notes: whole numbers of the caller. Texts that are alike in both are one: where two samples of a prompt
    begin alike, either may go on as the other.
    """

    cdef object _lengths, _tails, _notes, _parked
    cdef int64_t* _known  # in _lengths
    cdef int32_t* _ends  # in _tails
    cdef readonly int most_parked

    def __init__(self, num_rows, *, num_notes, most_parked=4096):
        self._lengths = np.zeros(num_rows, dtype=np.int64)  # by row; 0: none
        self._tails = np.zeros((num_rows, TAIL), dtype=np.int32)
        self._notes = np.zeros((num_rows, num_notes), dtype=np.int64)
        self._known = <int64_t*> cnp.PyArray_DATA(self._lengths)
        self._ends = <int32_t*> cnp.PyArray_DATA(self._tails)
        self._parked = OrderedDict()  # (length, tail): notes
        self.most_parked = most_parked

    def find(self, tokens, rows, lengths):
        """(length at the earlier step int64[B], 0 for a new text; the notes on it int64[B, num_notes]).

        tokens: int32[R, L]. rows: int64[B]. lengths: int64[B], tokens of the rows before what is new.
        """
        cdef Texts texts = texts_of(tokens, rows, lengths)
        cdef Py_ssize_t place
        cdef cnp.ndarray before_array = self._lengths[rows]
        cdef int64_t* before = <int64_t*> cnp.PyArray_DATA(before_array)
        cdef const int32_t* text
        notes, strangers = self._notes[rows], []
        for place in range(texts.num_texts):
            text = texts.tokens + texts.rows[place] * texts.width
            if not 0 < before[place] <= texts.lengths[place] or not _ends_with(
                text, before[place], self._ends + texts.rows[place] * TAIL
            ):
                before[place] = 0
                strangers.append(place)
        for place in strangers:
            text = texts.tokens + texts.rows[place] * texts.width
            found = self._elsewhere(texts.lengths[place], _tail(text, texts.lengths[place]))
            if found is not None:
                before[place], notes[place] = texts.lengths[place], found
        for place in strangers:
            self._park(texts.rows[place])
        return before_array, notes

    def keep(self, tokens, rows, lengths, notes):
        """What lies in the rows now, and what is to be remembered of it: int64[B, num_notes]."""
        cdef Texts texts = texts_of(tokens, rows, lengths)
        cdef Py_ssize_t place
        cdef int64_t row
        self._notes[rows] = notes
        for place in range(texts.num_texts):
            row = texts.rows[place]
            self._known[row] = texts.lengths[place]
            _copy_tail(texts.tokens + row * texts.width, texts.lengths[place], self._ends + row * TAIL)

    def _elsewhere(self, length, tail):
        """The notes on a text that lay in another row, or left the array."""
        moved = np.flatnonzero((self._lengths == length) & (self._tails == tail).all(axis=1))
        return self._notes[moved[0]] if len(moved) else self._parked.get((length, tail.tobytes()))

    def _park(self, row):
        if self._lengths[row] > 0:
            self._parked[int(self._lengths[row]), self._tails[row].tobytes()] = self._notes[row].copy()
            if len(self._parked) > self.most_parked:
                self._parked.popitem(last=False)


cdef class NamedTexts:
    """The texts that were shown under a name: how long they were, and the scope of each."""

    cdef dict _texts  # name: (length, scope)

    def __init__(self):
        self._texts = {}

    def __contains__(self, name):
        return name in self._texts

    def find(self, names, lengths):
        """(length when it was last shown int64[B], scopes list[B]): -1 and 0 for a new name, and where a text is
        shorter than the one of that name was."""
        cdef Py_ssize_t row
        cdef int64_t length
        cdef tuple known
        cdef Py_ssize_t num_names = len(names)
        cdef cnp.ndarray before_array = np.empty(num_names, dtype=np.int64)
        cdef int64_t* before = <int64_t*> cnp.PyArray_DATA(before_array)
        cdef list scopes = []
        for row in range(num_names):
            known = self._texts.get(names[row])
            length = -1 if known is None else known[0]
            if length > <int64_t> lengths[row]:
                length = -1
            before[row] = length
            scopes.append(0 if length < 0 else known[1])
        return before_array, scopes

    def keep(self, names, lengths, scopes):
        """What was shown now."""
        cdef Py_ssize_t row
        for row in range(len(names)):
            self._texts[names[row]] = (lengths[row], scopes[row])

    def forget(self, names):
        for name in names:
            self._texts.pop(name, None)


cdef void _copy_tail(const int32_t* text, int64_t length, int32_t* tail) noexcept:
    """The last tokens of a text; a short one repeats its first token."""
    cdef int64_t age
    if length >= TAIL:
        memcpy(tail, text + length - TAIL, TAIL * sizeof(int32_t))
        return
    for age in range(TAIL):
        tail[age] = text[max(0, length - TAIL + age)]


cdef bint _ends_with(const int32_t* text, int64_t length, const int32_t* tail) noexcept:
    cdef int32_t[TAIL] end
    _copy_tail(text, length, end)
    return memcmp(end, tail, sizeof(end)) == 0


cdef object _tail(const int32_t* text, int64_t length):
    cdef cnp.ndarray tail = np.empty(TAIL, dtype=np.int32)
    _copy_tail(text, length, <int32_t*> cnp.PyArray_DATA(tail))
    return tail
