"""What every step asks of all its rows and of all nodes of its drafts, each in one pass; the arrays of captured steps;
fused modules' rows on a CPU. One compiled module, because each by itself takes 6 kB of the wheel."""

include "fusion/cpu/row_kernels.pxi"
include "gpu/packets/packing.pxi"

from libc.math cimport fabs
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport calloc, free

import numpy as np


cdef class Row:
    """Committed tokens of a trajectory. The last one is *pending*: its keys are not in the cache yet."""

    cdef readonly int64_t index  # its number in the call
    cdef readonly int64_t prompt_word  # of `stand.seeds`; together they name its random numbers
    cdef readonly int64_t problem  # number of its prompt; the samples of a prompt share it
    cdef readonly int64_t request  # number of its request in the call
    cdef readonly int64_t num_steps  # verifications so far
    cdef readonly object media  # `stand.media.Media` that the prompt shows, or None
    cdef readonly int64_t rotary_offset  # added to the places of its tokens behind the prompt, for rotary positions
    cdef public int64_t num_drafted  # nodes drafted for it so far, roots excluded
    cdef public double started, ended  # seconds of the call's clock (`Stats.elapsed`)
    cdef public object finish_reason  # None while it is being decoded
    cdef Py_ssize_t _prompt_length, _max_new_tokens, _length, _room
    cdef object _tokens
    cdef int32_t* _written  # the same

    def __init__(self, index, prompt, max_new_tokens, *, problem=0, request=0, prompt_word=0, media=None):
        """prompt: int32 [L]; max_new_tokens: its limit; the others: see above."""
        self.index, self.prompt_word, self.problem, self.request = index, prompt_word, problem, request
        self._prompt_length = self._length = len(prompt)
        self._max_new_tokens = max_new_tokens
        self.media, self.rotary_offset = media, 0 if media is None else media.rotary_offset
        self._hold(np.empty(len(prompt) + min(max_new_tokens, 256), dtype=np.int32))
        self._tokens[: len(prompt)] = prompt

    @property
    def history(self):
        """[prompt + generated] int32 view, the pending token last."""
        return self._tokens[: self._length]

    @property
    def prompt(self):
        return self._tokens[: self._prompt_length]

    @property
    def new_token_ids(self):
        return self._tokens[self._prompt_length : self._length]

    @property
    def num_cached(self):
        """Tokens whose keys the cache holds."""
        return self._length - 1

    @property
    def num_remaining(self):
        """New tokens that may still come."""
        return self._remaining()

    @property
    def most_cached(self):
        """Tokens whose keys the cache may come to hold, drafts aside."""
        return self._prompt_length + self._max_new_tokens - 1

    cdef int _hold(self, tokens) except -1:
        cdef int32_t[::1] written = tokens
        self._tokens, self._written, self._room = tokens, &written[0], written.shape[0]
        return 0

    cdef Py_ssize_t _remaining(self) noexcept:
        return self._max_new_tokens - (self._length - self._prompt_length)

    def extend(self, list token_ids not None):
        """Commit one step's tokens."""
        cdef Py_ssize_t end = self._length, most = end + len(token_ids)
        if most > self._room:
            self._hold(np.concatenate([self._tokens, np.empty(most, dtype=np.int32)]))
        for token in token_ids:
            self._written[end] = token
            end += 1
        self._length = end
        self.num_steps += 1


def gathered(rows):
    """Of each `Row` its history, a list, and as [7, B] int64 its index, prompt word, steps, problem, tokens in the
    cache, how deep a draft may be of use, and its rotary offset."""
    cdef Py_ssize_t place = 0
    cdef Row row
    columns, histories = np.empty((7, len(rows)), dtype=np.int64), []
    cdef int64_t[:, ::1] numbers = columns
    for row in rows:
        histories.append(row._tokens[: row._length])
        numbers[0, place] = row.index
        numbers[1, place] = row.prompt_word
        numbers[2, place] = row.num_steps
        numbers[3, place] = row.problem
        numbers[4, place] = row._length - 1
        numbers[5, place] = row._remaining() - 1
        numbers[6, place] = row.rotary_offset
        place += 1
    return histories, columns


# The ids of one support, by a hash. Kept from call to call, under the interpreter's lock: a number says which support a
# place belongs to, so nothing is cleared.
cdef struct Place:
    int64_t support
    int32_t token

cdef Place* _places = NULL
cdef Py_ssize_t _num_places = 0
cdef int64_t _support = 0


cdef int make_places(Py_ssize_t least) except -1:
    """At least so many, a power of two."""
    global _places, _num_places
    cdef Py_ssize_t size = 64
    if _num_places >= least:
        return 0
    while size < least:
        size *= 2
    free(_places)
    _places, _num_places = <Place*>calloc(size, sizeof(Place)), size
    if _places == NULL:
        _num_places = 0
        raise MemoryError()
    return 0


cdef bint is_new(int32_t token) noexcept:
    """Whether the support that was started last has this token for the first time; it has fewer tokens than places."""
    cdef Py_ssize_t place = <uint32_t>token * <uint32_t>2654435761
    while _places[place & (_num_places - 1)].support == _support:
        if _places[place & (_num_places - 1)].token == token:
            return False
        place += 1
    _places[place & (_num_places - 1)] = Place(_support, token)
    return True


def is_sound(
    const int32_t[::1] token_ids not None,  # [M]
    const int32_t[::1] parents not None,  # [M] row-local, -1 at roots
    const int32_t[::1] offsets not None,  # [B + 1]
    const int32_t[:, ::1] support_ids not None,  # [M, S]
    const float[:, ::1] law not None,  # [M, S]
    const int32_t[::1] depths not None,  # [M]
    const int32_t[::1] ranks not None,  # [M]
    histories,  # B arrays int32, the pending token last
    Py_ssize_t vocabulary_size,
    double tolerance,
):
    """Whether every root is its row's pending token, every id is in the vocabulary, no support names one twice, parents
    come before their children and lie a level above them, ranks count siblings, and every child's law sums to 1, is
    nowhere negative, has no mass on padding and gives the child's own token mass."""
    global _support
    cdef int32_t[::1] children = np.zeros(token_ids.shape[0], dtype=np.int32)  # of every node so far
    cdef Py_ssize_t num_nodes = token_ids.shape[0], width = support_ids.shape[1], row = 0, first, node, slot, above
    make_places(2 * width)
    cdef double total, mass
    cdef bint has_own
    if not parents.shape[0] == support_ids.shape[0] == law.shape[0] == num_nodes or law.shape[1] != width:
        return False
    if depths.shape[0] != num_nodes or ranks.shape[0] != num_nodes:
        return False
    if offsets.shape[0] != len(histories) + 1 or offsets[0] != 0 or offsets[offsets.shape[0] - 1] != num_nodes:
        return False
    for history in histories:
        first = offsets[row]
        row += 1
        if not first < offsets[row] <= num_nodes or parents[first] != -1:
            return False
        if token_ids[first] != history[len(history) - 1]:
            return False
        if depths[first] != 0 or ranks[first] != 0:
            return False
        for node in range(first, offsets[row]):
            if not 0 <= token_ids[node] < vocabulary_size:
                return False
            _support += 1
            for slot in range(width):
                if support_ids[node, slot] >= vocabulary_size:
                    return False
                if support_ids[node, slot] >= 0 and not is_new(support_ids[node, slot]):
                    return False
            if node == first:
                continue
            if not 0 <= parents[node] < node - first:
                return False
            above = first + parents[node]
            if depths[node] != depths[above] + 1 or ranks[node] != children[above]:
                return False
            children[above] += 1
            total = 0.0
            has_own = False
            for slot in range(width):
                mass = law[node, slot]
                if not mass >= 0.0 or (mass > 0.0 and support_ids[above, slot] < 0):
                    return False
                total += mass
                if support_ids[above, slot] == token_ids[node] and mass > 0.0:
                    has_own = True
            if not (has_own and fabs(total - 1.0) <= tolerance):
                return False
    return True
