// The invariants of a blended lookup, for tests.

#pragma once

#include "lookup.h"

namespace stand {

[[gnu::cold]] inline const char* BlendedLookup::find_fault() const {
    const std::lock_guard guard(mutex);
    if (nbytes() > settings.max_bytes) return "more bytes than max_bytes";
    int64_t num_reached = 0;
    const char* fault = empty_ == 0 ? nullptr : find_fault_below(empty_, 0, num_reached);
    for (uint32_t token = 0; (token = paged_token(token)) < num_root_slots() && fault == nullptr; ++token)
        for (const int32_t order : ONE_TOKEN_ORDERS) {
            const uint32_t reference = root(token, order);
            if (reference == 0) continue;
            if (arena.at(reference)->parent != token) return "a context of one token that is another one";
            fault = find_fault_below(reference, order, num_reached);
            if (fault != nullptr) break;
        }
    if (fault != nullptr) return fault;
    if (!ends_are_sound()) return "a recent end whose contexts are elsewhere";
    if (num_reached > arena.num_blocks()) return "contexts that are free memory";
    if (unlisted_orphan_ != 0)
        fault = find_fault_below(unlisted_orphan_, order_of(arena.at(unlisted_orphan_)), num_reached);
    int32_t num_listed = 0;
    for (uint32_t orphan = first_orphan_; orphan != 0 && fault == nullptr; orphan = arena.at(orphan)->parent) {
        if (++num_listed > num_orphans_) return "more contexts that wait to be freed than are counted";
        if (!is_orphan(arena.at(orphan))) return "a context that waits to be freed and does not say so";
        fault = find_fault_below(orphan, order_of(arena.at(orphan)), num_reached);
    }
    if (fault != nullptr) return fault;
    return num_reached == arena.num_blocks() ? nullptr : "contexts that nothing leads to and that nothing will free";
}

[[gnu::cold]] inline const char* BlendedLookup::find_fault_below(uint32_t reference, int32_t order,
                                                                int64_t& num_reached) const {
    const Block* block = arena.at(reference);
    ++num_reached;
    if (order_of(block) != order || (order > depth() && order != SKIP)) return "a context of the wrong order";
    if (block->size > capacity_of(block) || block->size > max_entries(order)) return "a context with too many entries";
    for (int32_t i = 0; i < block->size; ++i) {
        if (find_entry(block, tokens_of(block)[i]) != i) return "a token twice in one context";
        const uint32_t child = children_of(block)[i];
        if (child == 0) continue;
        if (!may_have_longer(order)) return "a longer context where none may be";
        if (arena.at(child)->parent != reference) return "a context whose parent is another one";
        const char* fault = find_fault_below(child, order + 1, num_reached);
        if (fault != nullptr) return fault;
    }
    return nullptr;
}

[[gnu::cold]] inline bool BlendedLookup::ends_are_sound() const {
    for (int32_t place = 0; place < EndCache::NUM_ENDS; ++place) {
        const uint32_t* window = ends_.window_at(place);
        if (window == nullptr) continue;
        const Contexts& end = ends_.contexts_at(place);
        const Contexts found = walk<Contexts>(window, ends_.size());
        if (end.token != found.token || end.longest != found.longest ||
            !std::equal(found.blocks + 1, found.blocks + 1 + found.longest, end.blocks + 1))
            return false;
    }
    return true;
}

}  // namespace stand
