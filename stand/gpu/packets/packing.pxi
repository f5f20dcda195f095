"""Fills the arrays of a packed step from its drafts in one pass, without Python per node, in stand.step_compiled."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memset

import numpy as np

cdef enum:
    MAX_ROW_NODES = 256


cdef class StepArrays:
    """The arrays of one packed step of at most M tokens and B rows, filled in place (see `StepPacket` for each)."""

    cdef int64_t[::1] token_ids, positions, slots  # [M]; slots: page * its size + slot in it
    cdef int64_t[::1] rotary_positions  # [M]
    cdef int64_t[:, ::1] ancestors  # [M, W] bit j of a row: local node j is an ancestor, or itself
    cdef int64_t[::1] parents  # [M] packed; roots and padding are their own parents
    cdef int64_t[::1] depths
    cdef int64_t[::1] follows  # [M] 1 where a walk may step to the node: a child, first of its token
    cdef int64_t[::1] turns  # [M] which nodes can be settled at once, by row: see `list_turns`
    cdef int32_t[::1] offsets  # [B + 1]
    cdef int64_t[::1] lengths, cache_rows  # [B]
    cdef int32_t[:, ::1] pages  # [B, T] of all rows of the cache
    cdef list works  # a `ListArrays` each
    cdef Py_ssize_t num_tokens  # filled the time before

    def __init__(self, arrays, tilings):
        """`arrays` by name, zeros; tilings: a `Tiling` for each work list, number n being in `items_n` and
        `partial_starts_n`."""
        self.token_ids, self.positions, self.slots = arrays["token_ids"], arrays["positions"], arrays["slots"]
        self.ancestors, self.parents = arrays["ancestors"], arrays["parents"]
        self.rotary_positions = arrays["rotary_positions"]
        self.depths, self.follows, self.turns = arrays["depths"], arrays["follows"], arrays["turns"]
        self.offsets, self.lengths, self.cache_rows = arrays["offsets"], arrays["lengths"], arrays["cache_rows"]
        self.pages = arrays["pages"]
        self.works = [
            ListArrays(arrays[f"items_{number}"], arrays[f"partial_starts_{number}"], tiling)
            for number, tiling in enumerate(tilings)
        ]
        self.num_tokens = self.token_ids.shape[0]

    def fill(
        self,
        const int32_t[::1] token_ids not None,  # [m] the drafts, m <= M
        const int32_t[::1] parents not None,  # [m] row-local, -1 at roots
        const int32_t[::1] depths not None,  # [m]
        const int32_t[::1] offsets not None,  # [b + 1], b <= B
        const int64_t[::1] lengths not None,  # [b] committed keys of each row
        const int64_t[::1] rotary_offsets not None,  # [b]
        const int64_t[::1] cache_rows not None,  # [b]
        const int32_t[:, ::1] pages not None,  # [B, T] slot s of cache row r is in page pages[r, s // page_size]
        const int64_t[::1] ends not None,  # [B] slots that a cache row may write
        int64_t page_size,
        int64_t spare_slot,  # takes what padding writes
    ):
        """One step; what is left over becomes padding.

        Raises ValueError when the drafts do not fit: more rows or nodes than the arrays hold, a row of more nodes than
        W * 64, or a slot that a row has no page for.
        """
        cdef Py_ssize_t row, num_rows = lengths.shape[0], end
        self._check(token_ids.shape[0], offsets, lengths, cache_rows, pages, ends)
        memset(&self.ancestors[0, 0], 0, self.num_tokens * self.ancestors.shape[1] * sizeof(int64_t))
        for row in range(num_rows):
            end = _parts(lengths[row] + offsets[row + 1] - offsets[row], page_size)
            if end > 0:
                memcpy(&self.pages[cache_rows[row], 0], &pages[cache_rows[row], 0], end * sizeof(int32_t))
            self._fill_row(
                row, token_ids, parents, depths, offsets, lengths[row], rotary_offsets[row],
                &pages[cache_rows[row], 0], page_size,
            )
            self.lengths[row], self.cache_rows[row] = lengths[row], cache_rows[row]
        self._pad(token_ids.shape[0], num_rows, spare_slot)
        for work in self.works:
            (<ListArrays>work).list(offsets, lengths, cache_rows)

    cdef _check(
        self, Py_ssize_t num_tokens, const int32_t[::1] offsets, const int64_t[::1] lengths,
        const int64_t[::1] cache_rows, const int32_t[:, ::1] pages, const int64_t[::1] ends,
    ):
        cdef Py_ssize_t row, most = min(self.ancestors.shape[1] * 64, MAX_ROW_NODES)
        if num_tokens > self.token_ids.shape[0] or lengths.shape[0] > self.lengths.shape[0]:
            raise ValueError(
                f"a packed step made for {self.token_ids.shape[0]} tokens of {self.lengths.shape[0]} rows must hold "
                f"its drafts, got {num_tokens} tokens of {lengths.shape[0]} rows; take a larger step size"
            )
        if pages.shape[0] != self.pages.shape[0] or pages.shape[1] != self.pages.shape[1]:
            raise ValueError(
                f"the page table must be as large as the packet's, {self.pages.shape[0]} by {self.pages.shape[1]}, got "
                f"{pages.shape[0]} by {pages.shape[1]}; record the step anew"
            )
        for row in range(lengths.shape[0]):
            if offsets[row + 1] - offsets[row] > most:
                raise ValueError(
                    f"a row's draft must have at most {most} nodes, got {offsets[row + 1] - offsets[row]}; "
                    "lower the budget"
                )
            if lengths[row] + offsets[row + 1] - offsets[row] > ends[cache_rows[row]]:
                raise ValueError(
                    f"a row must have pages for all that it writes, got {lengths[row]} committed tokens and "
                    f"{offsets[row + 1] - offsets[row]} nodes where its pages end at slot {ends[cache_rows[row]]}; let "
                    "the page table take further pages first"
                )

    cdef void _fill_row(
        self, Py_ssize_t row, const int32_t[::1] token_ids, const int32_t[::1] parents, const int32_t[::1] depths,
        const int32_t[::1] offsets, int64_t length, int64_t rotary_offset, const int32_t* pages, int64_t page_size
    ) noexcept:
        """Row `row`, whose slots lie in `pages`."""
        cdef Py_ssize_t first = offsets[row], num_words = self.ancestors.shape[1]
        cdef Py_ssize_t node, packed, parent, word, twin, slot
        self.offsets[row] = offsets[row]
        for packed in range(first, offsets[row + 1]):
            node = packed - first
            parent = packed if parents[packed] < 0 else first + parents[packed]
            self.token_ids[packed] = token_ids[packed]
            self.positions[packed] = length + depths[packed]
            self.rotary_positions[packed] = self.positions[packed] + rotary_offset
            slot = length + node
            self.slots[packed] = pages[slot // page_size] * page_size + slot % page_size
            self.parents[packed] = parent
            self.depths[packed] = depths[packed]
            self.follows[packed] = node > 0
            for twin in range(parent + 1, packed):  # siblings of one token: the earliest is the one that is followed
                if parents[twin] == parents[packed] and token_ids[twin] == token_ids[packed]:
                    self.follows[packed] = 0
                    break
            for word in range(num_words):
                self.ancestors[packed, word] = self.ancestors[parent, word]
            self.ancestors[packed, node >> 6] = <int64_t>(
                (<uint64_t>self.ancestors[packed, node >> 6]) | ((<uint64_t>1) << (node & 63))
            )
        if offsets[row + 1] > first:
            list_turns(&parents[first], <int32_t>(offsets[row + 1] - first), &self.turns[first])

    cdef void _pad(self, Py_ssize_t num_tokens, Py_ssize_t num_rows, int64_t spare_slot) noexcept:
        """What is behind the drafts, as far as the fill before reached."""
        cdef Py_ssize_t row, packed
        for row in range(num_rows, self.lengths.shape[0]):
            self.lengths[row] = self.cache_rows[row] = 0
        for row in range(num_rows, self.offsets.shape[0]):
            self.offsets[row] = <int32_t>num_tokens
        for packed in range(num_tokens, self.num_tokens):
            self.token_ids[packed] = self.positions[packed] = self.depths[packed] = 0
            self.rotary_positions[packed] = 0
            self.follows[packed] = self.turns[packed] = 0
            self.slots[packed] = spare_slot
            self.parents[packed] = packed
        self.num_tokens = num_tokens


cdef void list_turns(const int32_t* parents, int32_t count, int64_t* out_turns) noexcept:
    """A row's nodes below its root, parents [n] row-local, in as few turns [n] as their order allows.

    A node comes after its earlier siblings, the first child after its parent: of the nodes of one turn none reads what
    another one writes. Up to 8 nodes make a turn, a byte each from the lowest on; 0 is none. The last word, which no
    turn can need, is the number of turns. n is 256 at most.
    """
    cdef int32_t before[MAX_ROW_NODES]  # the node that has to come before: the youngest child so far
    cdef int32_t rounds[MAX_ROW_NODES]
    cdef int32_t places[MAX_ROW_NODES]  # nodes per round, then where its next node goes
    cdef int32_t place, node, parent, turns = 0
    memset(places, 0, sizeof(places))
    memset(out_turns, 0, count * sizeof(int64_t))
    rounds[0] = before[0] = 0
    for node in range(1, count):
        parent, before[node] = parents[node], node
        rounds[node] = rounds[before[parent]] + 1
        before[parent] = node
        places[rounds[node]] += 1
    for node in range(1, count):  # rounds are numbered so, too
        place, places[node] = places[node], turns * 8
        turns += (place + 7) // 8
    for node in range(1, count):
        place = places[rounds[node]]
        places[rounds[node]] += 1
        out_turns[place // 8] |= <int64_t>((<uint64_t>node) << (8 * (place % 8)))
    out_turns[count - 1] = turns


def outgrown(
    const int64_t[::1] lengths not None,  # [b]
    const int32_t[::1] offsets not None,  # [b + 1]
    const int64_t[::1] cache_rows not None,  # [b]
    const int64_t[::1] ends not None,  # [B]
) -> list:
    """The packed rows whose nodes reach beyond the slots that their cache rows may write."""
    cdef Py_ssize_t row
    return [
        row for row in range(lengths.shape[0])
        if lengths[row] + offsets[row + 1] - offsets[row] > ends[cache_rows[row]]
    ]  # fmt: skip


cdef class ListArrays:
    """The arrays of one work list, filled in place as `stand.gpu.packets.work_list.WorkList` says."""

    cdef int32_t[:, ::1] items  # [I, 8]
    cdef int32_t[::1] partial_starts  # [M + 1]
    cdef int64_t tile_tokens, row_items, shortest, window
    cdef Py_ssize_t num_used  # items filled the time before

    def __init__(self, items, partial_starts, tiling):
        self.items, self.partial_starts = items, partial_starts
        self.tile_tokens, splitting = tiling.tile_tokens, tiling.splitting
        self.row_items, self.shortest, self.window = splitting.row_items, splitting.shortest, splitting.window
        self.num_used = self.items.shape[0]

    cpdef Py_ssize_t list(
        self, const int32_t[::1] offsets, const int64_t[::1] lengths, const int64_t[::1] cache_rows
    ) except -1:
        """The number of items; what is left over becomes padding. offsets [B + 1]; lengths, cache_rows [B].

        Raises ValueError where the list does not fit."""
        cdef Py_ssize_t num_rows = lengths.shape[0], row, item = 0, token
        cdef int64_t tokens, tile, tiles, split, splits, split_length, first, begin
        cdef int32_t partial = 0
        for row in range(num_rows):
            tokens, first = offsets[row + 1] - offsets[row], offsets[row]
            tiles, begin = _parts(tokens, self.tile_tokens), _first_slot(lengths[row], self.window)
            split_length = _split_length(lengths[row] - begin, tiles, self.row_items, self.shortest)
            splits = max(_parts(lengths[row] - begin, split_length), 1)
            if item + tiles * splits > self.items.shape[0] or first + tokens >= self.partial_starts.shape[0]:
                raise ValueError(
                    f"the buffers must hold the whole list, got {self.items.shape[0]} items and "
                    f"{self.partial_starts.shape[0] - 1} tokens; size them with most_items and the step's token count"
                )
            for token in range(first, first + tokens):
                self.partial_starts[token] = partial
                partial += <int32_t>splits
            for split in range(splits):
                for tile in range(tiles):
                    self.items[item, 0] = <int32_t>first
                    self.items[item, 1] = <int32_t>(first + tile * self.tile_tokens)
                    self.items[item, 2] = <int32_t>min(tokens - tile * self.tile_tokens, self.tile_tokens)
                    self.items[item, 3] = <int32_t>cache_rows[row]
                    self.items[item, 4] = <int32_t>lengths[row]
                    self.items[item, 5] = <int32_t>(begin + split * split_length)
                    self.items[item, 6] = <int32_t>(begin + (split + 1) * split_length)
                    if split == splits - 1:  # the row's own tokens too, up to the last that the tile can see
                        self.items[item, 6] = <int32_t>(lengths[row] + tile * self.tile_tokens) + self.items[item, 2]
                    self.items[item, 7] = <int32_t>split
                    item += 1
        for token in range(offsets[num_rows], self.partial_starts.shape[0]):
            self.partial_starts[token] = partial
        if self.num_used > item:
            memset(&self.items[item, 0], 0, (self.num_used - item) * 8 * sizeof(int32_t))
        self.num_used = item
        return item


cdef inline int64_t _first_slot(int64_t length, int64_t window) noexcept:
    """The first slot that a token behind `length` committed ones can see, rounded down to a whole block of 64 keys."""
    return max(length - window + 1, 0) // 64 * 64 if window > 0 else 0


cdef inline int64_t _split_length(int64_t slots, int64_t tiles, int64_t row_items, int64_t shortest) noexcept:
    """Slots per split: as many splits as make `row_items` items of the row's tiles, in whole blocks of 64 keys."""
    cdef int64_t splits = max(row_items // max(tiles, 1), 1)
    return max(_parts(_parts(slots, splits), 64) * 64, shortest)


cdef inline int64_t _parts(int64_t whole, int64_t part) noexcept:
    """How many parts cover the whole."""
    return (whole + part - 1) // part


def fill_laws(
    const int32_t[:, ::1] support_ids not None,  # [m, s] of the drafts, m <= M, s <= S; -1 is padding
    const float[:, ::1] law not None,  # [m, s]
    int32_t[:, ::1] out_support_ids not None,  # [M, S]
    float[:, ::1] out_law not None,  # [M, S]
):
    """Recorded laws into a packet; what is left over becomes padding without mass."""
    cdef Py_ssize_t node, width = support_ids.shape[1], room = out_law.shape[1]
    memset(&out_support_ids[0, 0], 0xFF, out_law.shape[0] * room * sizeof(int32_t))  # -1
    memset(&out_law[0, 0], 0, support_ids.shape[0] * room * sizeof(float))
    for node in range(support_ids.shape[0] if width else 0):
        memcpy(&out_support_ids[node, 0], &support_ids[node, 0], width * sizeof(int32_t))
        memcpy(&out_law[node, 0], &law[node, 0], width * sizeof(float))


def kept_paths(
    const int64_t[::1] stops not None,  # [B] packed node where each row stops
    const int32_t[::1] parents not None,  # [M] row-local, -1 at roots
    const int32_t[::1] offsets not None,  # [B + 1]
) -> list:
    """B arrays int32: the row-local nodes from below the root down to each stop, as `Verdicts.accepted` has them."""
    cdef Py_ssize_t row, place, first, end = 0
    cdef int32_t node
    nodes = np.empty(parents.shape[0], dtype=np.int32)  # a path has fewer nodes than its row
    bounds = []
    cdef int32_t[::1] kept = nodes
    for row in range(stops.shape[0]):
        node, first = <int32_t>(stops[row] - offsets[row]), end
        while node > 0:
            node = parents[offsets[row] + node]
            end += 1
        node = <int32_t>(stops[row] - offsets[row])
        for place in range(end - 1, first - 1, -1):
            kept[place] = node
            node = parents[offsets[row] + node]
        bounds.append((first, end))
    return [nodes[start:stop] for start, stop in bounds]
