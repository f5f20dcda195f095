// A blended lookup as plain arrays, for files: the empty context, then contexts from the root down, each before the
// contexts below it. What is marked as cold is compiled for its size.

#pragma once

#include "memory.h"

namespace stand {

struct Snapshot {
    std::vector<uint32_t> roots;      // [R] twice the token of the contexts of order 1, of SKIP one more; ascending
    std::vector<uint8_t> sizes;       // [C] entries per context
    std::vector<uint8_t> visits;      // [C]
    std::vector<uint32_t> tokens;     // [E]
    std::vector<uint16_t> weights;    // [E]
    std::vector<uint8_t> has_child;   // [E]
    std::vector<float> odds;          // entries, escapes, factors of the calibrations
};

constexpr int64_t NUM_CHOICES = NUM_ORDERS * (ENTRY_BUCKETS + ESCAPE_BUCKETS);
constexpr int64_t NUM_ODDS = NUM_CHOICES + NUM_GROWN_KINDS * Calibration::NUM_FACTORS;

constexpr int32_t NUM_ENTRY_ODDS = NUM_ORDERS * ENTRY_BUCKETS;

// Files list the odds of entries by order, weight, age and rank: the bucket of a place in that list.
inline int32_t bucket_at(int32_t place) {
    const int32_t rank = place % NUM_RANKS, age = place / NUM_RANKS % NUM_AGES;
    const int32_t weight = place / (NUM_RANKS * NUM_AGES) % NUM_WEIGHTS;
    return entry_bucket(place / ENTRY_BUCKETS, weight, age, rank);
}

[[gnu::cold]] inline void append_context(const BlendedLookup& lookup, uint32_t reference, Snapshot& snapshot) {
    const Block* block = lookup.arena.at(reference);
    snapshot.sizes.push_back(block->size);
    snapshot.visits.push_back(block->visits);
    for (int32_t i = 0; i < block->size; ++i) {
        snapshot.tokens.push_back(tokens_of(block)[i]);
        snapshot.weights.push_back(weights_of(block)[i]);
        snapshot.has_child.push_back(children_of(block)[i] != 0);
    }
    for (int32_t i = 0; i < block->size; ++i)
        if (children_of(block)[i] != 0) append_context(lookup, children_of(block)[i], snapshot);
}

constexpr int64_t TURN_CONTEXTS = 1024;  // copied before others have the lookup

// What is learned meanwhile is in it or not, by root: contexts of different roots share nothing.
[[gnu::cold]] inline void take_snapshot(const BlendedLookup& lookup, Snapshot& snapshot) {
    Turn turn(lookup.mutex, TURN_CONTEXTS);
    // It was made before all others.
    if (lookup.empty_context() != 0) append_context(lookup, lookup.empty_context(), snapshot);
    for (uint32_t token = 0; (token = lookup.paged_token(token)) < lookup.num_root_slots(); ++token)
        for (const int32_t order : ONE_TOKEN_ORDERS) {
            if (lookup.root(token, order) == 0) continue;
            const size_t before = snapshot.sizes.size();
            snapshot.roots.push_back(2 * token + (order == SKIP));
            append_context(lookup, lookup.root(token, order), snapshot);
            turn.count(static_cast<int64_t>(snapshot.sizes.size() - before));
        }
    for (int32_t place = 0; place < NUM_ENTRY_ODDS; ++place)
        snapshot.odds.push_back(lookup.odds.entry[bucket_at(place)]);
    snapshot.odds.insert(snapshot.odds.end(), std::begin(lookup.odds.escape), std::end(lookup.odds.escape));
    for (const Calibration& calibration : lookup.calibrations)
        snapshot.odds.insert(snapshot.odds.end(), std::begin(calibration.factors), std::end(calibration.factors));
}

struct SnapshotView {
    const uint32_t* roots;
    const uint8_t* sizes;
    const uint8_t* visits;
    const uint32_t* tokens;
    const uint16_t* weights;
    const uint8_t* has_child;
    const float* odds;
    int64_t num_roots, num_contexts, num_entries;
};

enum class Restored : int32_t { complete = 0, damaged = 1, too_large = 2 };

// Fills an empty lookup; trusts nothing in the snapshot. is_its_cap: what does not fit is left out, with all below it.
// While a snapshot of a full lookup is taken, contexts go and others get their memory; it may hold both.
class SnapshotReader {
   public:
    SnapshotReader(const SnapshotView& snapshot, BlendedLookup& lookup, bool is_its_cap)
        : snapshot_(snapshot), lookup_(lookup), is_its_cap_(is_its_cap) {}

    [[gnu::cold]] Restored read() {
        if (snapshot_.num_contexts > 0) {
            const Restored result = read_context(0, 0, 0, 0);
            if (result != Restored::complete) return result;
        }
        for (int64_t root = 0; root < snapshot_.num_roots; ++root) {
            const uint32_t place = snapshot_.roots[root];
            if (root > 0 && place <= snapshot_.roots[root - 1]) return Restored::damaged;
            const Restored result = read_context(place % 2 == 0 ? 1 : SKIP, 0, 0, place / 2);
            if (result != Restored::complete) return result;
        }
        if (context_ != snapshot_.num_contexts || entry_ != snapshot_.num_entries) return Restored::damaged;
        return read_odds();
    }

   private:
    const SnapshotView& snapshot_;
    BlendedLookup& lookup_;
    const bool is_its_cap_;
    int64_t context_ = 0, entry_ = 0;

    [[gnu::cold]] Restored read_context(int32_t order, uint32_t parent, int32_t position, uint32_t token) {
        if ((order > lookup_.depth() && order != SKIP) || context_ >= snapshot_.num_contexts) return Restored::damaged;
        const int32_t size = snapshot_.sizes[context_], visits = snapshot_.visits[context_++];
        if (size > BlendedLookup::max_entries(order) || (size > 0 && visits == 0)) return Restored::damaged;
        if (size > snapshot_.num_entries - entry_) return Restored::damaged;
        const bool is_left_out = parent == 0 && order != 0 && !is_one_token(order);
        const uint32_t reference = is_left_out ? 0 : lookup_.add_block(order, parent, position, token, size);
        if (reference == 0 && !is_its_cap_) return Restored::too_large;
        Block* block = reference == 0 ? nullptr : lookup_.arena.at(reference);
        if (block != nullptr) block->visits = static_cast<uint8_t>(visits);
        const int64_t first = entry_;
        entry_ += size;
        for (int32_t i = 0; i < size; ++i)
            if (block != nullptr && !read_entry(block, first + i)) return Restored::damaged;
        for (int32_t i = 0; i < size; ++i) {
            if (!snapshot_.has_child[first + i]) continue;
            if (!may_have_longer(order)) return Restored::damaged;
            const Restored result = read_context(order + 1, reference, i, snapshot_.tokens[first + i]);
            if (result != Restored::complete) return result;
        }
        return Restored::complete;
    }

    [[gnu::cold]] bool read_entry(Block* block, int64_t entry) {
        const uint32_t token = snapshot_.tokens[entry];
        if (token > INT32_MAX || snapshot_.has_child[entry] > 1 || find_entry(block, token) >= 0) return false;
        const int32_t position = block->size++;
        tokens_of(block)[position] = token;
        children_of(block)[position] = 0;
        weights_of(block)[position] = snapshot_.weights[entry];
        stamps_of(block)[position] = 0;
        scopes_of(block)[position] = LOADED_SCOPE;
        return true;
    }

    [[gnu::cold]] Restored read_odds() {
        const float* factors = snapshot_.odds + NUM_CHOICES;
        for (int64_t i = 0; i < NUM_CHOICES; ++i)
            if (!(snapshot_.odds[i] >= 1e-4f && snapshot_.odds[i] <= 1e4f)) return Restored::damaged;
        for (int64_t i = 0; i < NUM_ODDS - NUM_CHOICES; ++i)
            if (!(factors[i] >= Calibration::LEAST_FACTOR && factors[i] <= Calibration::MOST_FACTOR))
                return Restored::damaged;
        for (int32_t place = 0; place < NUM_ENTRY_ODDS; ++place)
            lookup_.odds.entry[bucket_at(place)] = snapshot_.odds[place];
        std::copy(snapshot_.odds + NUM_ENTRY_ODDS, snapshot_.odds + NUM_CHOICES, lookup_.odds.escape);
        lookup_.odds.settle();
        for (int32_t kind = 0; kind < NUM_GROWN_KINDS; ++kind)
            std::copy_n(factors + kind * Calibration::NUM_FACTORS, Calibration::NUM_FACTORS,
                        lookup_.calibrations[kind].factors);
        return Restored::complete;
    }
};

}  // namespace stand
