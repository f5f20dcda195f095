// How contexts get their memory, move to larger blocks, and lose their memory to others.

#pragma once

#include <utility>

#include "lookup.h"

namespace stand {

inline uint32_t BlendedLookup::make_root(uint32_t token, int32_t order) {
    if (token == NO_NEWEST || !reserve_page(token >> PAGE_SHIFT)) return 0;
    const uint32_t reference = allocate(0);
    if (reference == 0) return 0;
    *arena.at(reference) = Block{token, 0, static_cast<uint8_t>(order << 4), 0, 0};
    return slot(token, order) = reference;
}

inline uint32_t BlendedLookup::make_empty() {
    if (empty_ == 0 && (empty_ = allocate(0)) != 0) *arena.at(empty_) = Block{0, 0, 0, 0, 0};
    return empty_;
}

// False where the page would pass the cap.
inline bool BlendedLookup::reserve_page(size_t page) {
    if (page < pages_.size() && pages_[page]) return true;
    const size_t added_slots = page < pages_.capacity() ? 0 : page + 1 - pages_.capacity();
    if (nbytes() + PAGE_BYTES + static_cast<int64_t>(added_slots * sizeof(Page)) > settings.max_bytes) return false;
    if (page >= pages_.size()) {
        pages_.reserve(page + 1);
        pages_.resize(page + 1);
    }
    pages_[page].reset(new uint32_t[PAGE_SLOTS]());
    ++num_pages_;
    return true;
}

// Moves the block of the cursor's context of an order to the next size class, and all that remember it follow. False
// where memory is short or nothing leads to it.
inline bool BlendedLookup::grow(const Cursor& cursor, int32_t order) {
    const uint32_t reference = cursor.blocks[order];
    if (is_abandoned(reference)) return false;  // listed where it is
    const int32_t size_class = class_of(arena.at(reference)) + 1;
    const uint32_t larger = allocate(size_class);
    if (larger == 0) return false;
    if (is_abandoned(reference)) {  // meanwhile, to make room
        arena.give(larger);
        return false;
    }
    Block* block = arena.at(larger);
    copy_block(arena.at(reference), block, size_class);
    for (int32_t i = 0; i < block->size; ++i)
        if (children_of(block)[i] != 0) arena.at(children_of(block)[i])->parent = larger;
    link(reference, larger);
    for (Cursor* held : cursors_)
        for (int32_t place = 0; place < NUM_ORDERS; ++place) {
            if (held->blocks[place] == reference) held->blocks[place] = larger;
            if (held->parents[place] == reference) held->parents[place] = larger;
        }
    ends_.move(cursor.token, order, reference, larger);
    arena.give(reference);
    return true;
}

// Points whatever leads to block `from` at `to`.
inline void BlendedLookup::link(uint32_t from, uint32_t to) {
    const Block* block = arena.at(from);
    const int32_t order = order_of(block);
    if (order == 0) empty_ = to;
    if (is_one_token(order)) slot(block->parent, order) = to;
    if (order == 0 || is_one_token(order)) return;
    Block* parent = arena.at(block->parent);
    for (int32_t i = 0; i < parent->size; ++i)
        if (children_of(parent)[i] == from) children_of(parent)[i] = to;
}

// A block of a class, from free memory, from what nothing leads to, or from a context that is not used; 0 where none
// was found in bounded time.
inline uint32_t BlendedLookup::allocate(int32_t size_class) {
    uint32_t reference = arena.take(size_class, nbytes() + SLAB_BYTES <= settings.max_bytes);
    int32_t tries = 0;
    for (; reference == 0 && tries < MAX_TRIES && free_orphan(); ++tries) reference = arena.take(size_class, false);
    for (; reference == 0 && tries < MAX_TRIES; ++tries)
        if (reclaim(arena.next_in_clock(size_class))) reference = arena.take(size_class, false);
    return reference;
}

// Frees a context without longer ones whose credit is used up, or takes one unit of its credit. Most have longer ones:
// that is asked first.
inline bool BlendedLookup::reclaim(uint32_t reference) {
    Block* block = arena.at(reference);
    const int32_t order = order_of(block);
    if (order == 0 || is_abandoned(reference)) return false;
    for (int32_t i = 0; i < block->size && block->credit == 0; ++i)
        if (children_of(block)[i] != 0) return false;
    if (is_held(reference)) return false;
    if (block->credit > 0) {
        --block->credit;
        return false;
    }
    link(reference, 0);
    arena.give(reference);
    ++num_evicted_;
    ends_.lose(order, reference);
    return true;
}

// Nothing leads to this context any more: it is freed later, with all that hangs on it. It is listed when the next one
// comes: its memory arrives meanwhile.
inline void BlendedLookup::abandon(uint32_t reference) {
    if (reference == 0) return;
    arena.fetch<1>(reference);
    if (unlisted_orphan_ != 0) list_orphan(unlisted_orphan_);
    unlisted_orphan_ = reference;
}

inline bool BlendedLookup::is_abandoned(uint32_t reference) const {
    return reference == unlisted_orphan_ || is_orphan(arena.at(reference));
}

// At the end of the list. What hangs on the orphan is fetched, for it is listed when the orphan is freed.
inline void BlendedLookup::list_orphan(uint32_t reference) {
    Block* block = arena.at(reference);
    block->order_class |= ORPHAN;
    block->parent = 0;
    if (num_orphans_++ == 0)
        first_orphan_ = reference;
    else
        arena.at(last_orphan_)->parent = reference;
    last_orphan_ = reference;
    for (int32_t i = 0; i < block->size; ++i) arena.fetch<1>(children_of(block)[i]);
}

// Frees the orphan that waits for the longest time; its longer contexts are orphans then. False where none waits, or
// that one is held.
inline bool BlendedLookup::free_orphan() {
    if (first_orphan_ == 0 && unlisted_orphan_ != 0) list_orphan(std::exchange(unlisted_orphan_, 0));
    const uint32_t reference = first_orphan_;
    if (reference == 0 || is_held(reference)) return false;
    const Block* block = arena.at(reference);
    first_orphan_ = block->parent;
    --num_orphans_;
    for (int32_t i = 0; i < block->size; ++i)
        if (children_of(block)[i] != 0) list_orphan(children_of(block)[i]);
    arena.give(reference);
    return true;
}

// Learning does this at every order, one more time than it makes contexts: orphans do not pile up. A few are kept, so
// that the longer contexts of each, far apart in memory, have time to arrive; the last order frees one of those too.
inline void BlendedLookup::free_spare_orphan(int32_t order) {
    if (num_orphans_ > ORPHANS_KEPT || order == 0) free_orphan();
}

// For loading: a block with room for `size` entries, below the entry at `position` of `parent` (orders 1 and SKIP:
// below the table, `token` its place; order 0: below nothing). 0 at the cap.
inline uint32_t BlendedLookup::add_block(int32_t order, uint32_t parent, int32_t position, uint32_t token,
                                        int32_t size) {
    int32_t size_class = 0;
    while (1 << size_class < size) ++size_class;
    const bool is_root = is_one_token(order);
    if (is_root && !reserve_page(token >> PAGE_SHIFT)) return 0;
    const uint32_t reference = arena.take(size_class, nbytes() + SLAB_BYTES <= settings.max_bytes);
    if (reference == 0) return 0;
    *arena.at(reference) = Block{is_root ? token : parent, 0, static_cast<uint8_t>(order << 4 | size_class), 0, 0};
    if (order == 0)
        empty_ = reference;
    else if (is_root)
        slot(token, order) = reference;
    else
        children_of(arena.at(parent))[position] = reference;
    return reference;
}

inline bool BlendedLookup::is_held(uint32_t reference) const {
    for (const Cursor* cursor : cursors_)
        for (int32_t order = 1; cursor != nullptr && order < NUM_ORDERS; ++order)
            if (cursor->blocks[order] == reference || cursor->parents[order] == reference) return true;
    return false;
}

}  // namespace stand
