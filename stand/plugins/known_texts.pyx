"""Which rows of a step go on a text of an earlier step: `KnownTexts` where an engine gives rows without names,
`NamedTexts` where it names them."""

from libc.stdint cimport int32_t, int64_t

from collections import OrderedDict

import numpy as np

cdef enum:
    TAIL = 16  # tokens by which a text is known again, together with its length


cdef class KnownTexts:
    """The texts that lay in an array's rows at the last step, and those that left it since, by length and last tokens.

    Each has notes: whole numbers of the caller. Texts that are alike in both are one: where two samples of a prompt
    begin alike, either may go on as the other.
    """

    cdef object _lengths, _tails, _notes, _parked
    cdef int64_t[::1] _known  # _lengths and _tails: to make a typed view takes as long as a row
    cdef int32_t[:, ::1] _ends
    cdef readonly int most_parked

    def __init__(self, num_rows, *, num_notes, most_parked=4096):
        self._lengths = np.zeros(num_rows, dtype=np.int64)  # by row; 0: none
        self._tails = np.zeros((num_rows, TAIL), dtype=np.int32)
        self._notes = np.zeros((num_rows, num_notes), dtype=np.int64)
        self._known, self._ends = self._lengths, self._tails
        self._parked = OrderedDict()  # (length, tail): notes
        self.most_parked = most_parked

    def find(self, const int32_t[:, ::1] tokens, const int64_t[::1] rows, const int64_t[::1] lengths):
        """(length at the earlier step int64[B], 0 for a new text; the notes on it int64[B, num_notes]).

        tokens: int32[R, L]. rows: int64[B]. lengths: int64[B], tokens of the rows before what is new.
        """
        cdef Py_ssize_t place, num_texts = rows.shape[0]
        before_array, notes = self._lengths[rows.base], self._notes[rows.base]
        cdef int64_t[::1] before = before_array
        strangers = []
        for place in range(num_texts):
            if not 0 < before[place] <= lengths[place] or not _ends_with(
                &tokens[rows[place], 0], before[place], &self._ends[rows[place], 0]
            ):
                before[place] = 0
                strangers.append(place)
        for place in strangers:
            found = self._elsewhere(lengths[place], _tail(&tokens[rows[place], 0], lengths[place]))
            if found is not None:
                before[place], notes[place] = lengths[place], found
        for place in strangers:
            self._park(rows[place])
        return before_array, notes

    def keep(self, const int32_t[:, ::1] tokens, const int64_t[::1] rows, const int64_t[::1] lengths, notes):
        """What lies in the rows now, and what is to be remembered of it: int64[B, num_notes]."""
        cdef Py_ssize_t place
        for place in range(rows.shape[0]):
            self._known[rows[place]] = lengths[place]
            _copy_tail(&tokens[rows[place], 0], lengths[place], &self._ends[rows[place], 0])
        self._notes[rows.base] = notes

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
        before_array = np.empty(len(names), dtype=np.int64)
        cdef int64_t[::1] before = before_array
        cdef list scopes = []
        for row in range(before.shape[0]):
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
    for age in range(TAIL):
        tail[age] = text[max(0, length - TAIL + age)]


cdef bint _ends_with(const int32_t* text, int64_t length, const int32_t* tail) noexcept:
    cdef int64_t age
    for age in range(TAIL):
        if tail[age] != text[max(0, length - TAIL + age)]:
            return False
    return True


cdef object _tail(const int32_t* text, int64_t length):
    cdef int32_t[::1] tail = np.empty(TAIL, dtype=np.int32)
    _copy_tail(text, length, &tail[0])
    return tail.base
