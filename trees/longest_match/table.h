// The lookup tree: for each order n, a hash table from the last n tokens to the likeliest next tokens.
//
// A context is given as a *window*: its tokens newest first, so that the first n entries are the order-n context and
// one pass hashes all orders.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../include/noise.h"

namespace stand {

constexpr int32_t NO_TOKEN = -1;

// The law after one context: the likeliest tokens in descending probability (ties: lowest id). size 0: none is known.
struct Law {
    const int32_t* token_ids = nullptr;
    const float* probabilities = nullptr;
    int32_t size = 0;
    int32_t order = 0;
    uint32_t count = 0;
};

// Contexts of one order. Entry e owns keys[e * order ...], top_ids[e * num_candidates ...] and top_probs likewise.
struct OrderTable {
    int32_t order;
    int32_t num_candidates;
    std::vector<int32_t> keys;
    std::vector<uint32_t> counts;
    std::vector<int32_t> top_ids;   // padded with NO_TOKEN
    std::vector<float> top_probs;   // padded with 0
    std::vector<uint32_t> buckets;  // entry + 1, 0 where free; a power of two, at most half full

    OrderTable(int32_t order, int32_t num_candidates) : order(order), num_candidates(num_candidates), buckets(16, 0) {}

    int64_t size() const { return static_cast<int64_t>(counts.size()); }

    int64_t find(uint64_t hash, const int32_t* window) const {
        const size_t bucket = locate(hash, window);
        return static_cast<int64_t>(buckets[bucket]) - 1;
    }

    int64_t find_or_add(uint64_t hash, const int32_t* window) {
        size_t bucket = locate(hash, window);
        if (buckets[bucket] != 0) return static_cast<int64_t>(buckets[bucket]) - 1;
        if (counts.size() >= std::numeric_limits<uint32_t>::max() - 1)
            throw std::length_error("a lookup tree holds fewer than 2**32 - 1 contexts of an order");
        if (2 * (counts.size() + 1) > buckets.size()) {
            double_buckets();
            bucket = locate(hash, window);
        }
        reserve_entry();
        keys.insert(keys.end(), window, window + order);
        counts.push_back(0);
        top_ids.insert(top_ids.end(), num_candidates, NO_TOKEN);
        top_probs.insert(top_probs.end(), num_candidates, 0.0f);
        buckets[bucket] = static_cast<uint32_t>(counts.size());
        return size() - 1;
    }

    Law law(int64_t entry) const {
        Law law;
        law.token_ids = top_ids.data() + entry * num_candidates;
        law.probabilities = top_probs.data() + entry * num_candidates;
        while (law.size < num_candidates && law.token_ids[law.size] != NO_TOKEN) ++law.size;
        law.order = order;
        law.count = counts[entry];
        return law;
    }

    int64_t nbytes() const {
        return static_cast<int64_t>(4 * (keys.capacity() + counts.capacity() + top_ids.capacity() +
                                         top_probs.capacity() + buckets.capacity()));
    }

   private:
    // The bucket that holds the context, or the free one where it belongs.
    size_t locate(uint64_t hash, const int32_t* window) const {
        const size_t mask = buckets.size() - 1;
        size_t bucket = hash & mask;
        while (buckets[bucket] != 0) {
            const int32_t* key = keys.data() + static_cast<size_t>(buckets[bucket] - 1) * order;
            if (std::equal(key, key + order, window)) return bucket;
            bucket = (bucket + 1) & mask;
        }
        return bucket;
    }

    // Room for one more entry in every array first, so that running out of memory leaves them in step.
    void reserve_entry() {
        if (counts.size() < counts.capacity()) return;
        const size_t room = std::max<size_t>(16, 2 * counts.size());
        keys.reserve(room * order);
        top_ids.reserve(room * num_candidates);
        top_probs.reserve(room * num_candidates);
        counts.reserve(room);
    }

    void double_buckets();
};

inline uint64_t hash_more(uint64_t hash, int32_t token) { return chain_key(hash, static_cast<uint32_t>(token)); }

inline void OrderTable::double_buckets() {
    std::vector<uint32_t> larger(2 * buckets.size(), 0);
    const size_t mask = larger.size() - 1;
    for (size_t entry = 0; entry < counts.size(); ++entry) {
        uint64_t hash = 0;
        for (int32_t age = 0; age < order; ++age) hash = hash_more(hash, keys[entry * order + age]);
        size_t bucket = hash & mask;
        while (larger[bucket] != 0) bucket = (bucket + 1) & mask;
        larger[bucket] = static_cast<uint32_t>(entry + 1);
    }
    buckets.swap(larger);
}

class Lookup {
   public:
    static constexpr int32_t MAX_ORDER = 16;

    std::vector<OrderTable> tables;  // ascending order
    int32_t num_candidates;
    double min_rate;
    mutable std::mutex mutex;  // held by every public verb, since they run without the interpreter's lock

    Lookup(const std::vector<int32_t>& orders, int32_t num_candidates, double min_rate)
        : num_candidates(num_candidates), min_rate(min_rate) {
        for (const int32_t order : orders) tables.emplace_back(order, num_candidates);
    }

    int32_t max_order() const { return tables.back().order; }

    void clear() {
        const std::lock_guard<std::mutex> guard(mutex);
        for (OrderTable& table : tables) table = OrderTable(table.order, num_candidates);
    }

    // Takes over the content of another lookup with the same parameters.
    void assign(const Lookup& other) {
        const std::scoped_lock guard(mutex, other.mutex);
        tables = other.tables;
    }

    int64_t size() const {
        const std::lock_guard<std::mutex> guard(mutex);
        int64_t total = 0;
        for (const OrderTable& table : tables) total += table.size();
        return total;
    }

    int64_t nbytes() const {
        const std::lock_guard<std::mutex> guard(mutex);
        int64_t total = 0;
        for (const OrderTable& table : tables) total += table.nbytes();
        return total;
    }

    // One observation of the context: the law of its next token, as `width` ids (NO_TOKEN: padding) and probabilities.
    // Without positive mass it says nothing and is skipped.
    void observe(const int32_t* window, int32_t available, const int32_t* ids, const float* probs, int32_t width) {
        bool has_mass = false;
        for (int32_t slot = 0; slot < width; ++slot) has_mass |= ids[slot] != NO_TOKEN && probs[slot] > 0.0f;
        if (!has_mass) return;
        uint64_t hash = 0;
        int32_t age = 0;
        for (OrderTable& table : tables) {
            if (table.order > available) break;
            while (age < table.order) hash = hash_more(hash, window[age++]);
            blend(table, table.find_or_add(hash, window), ids, probs, width);
        }
    }

    // The law after the longest known context of at least `floor_order` tokens; size 0 where there is none.
    Law longest(const int32_t* window, int32_t available, int32_t floor_order) const {
        uint64_t hashes[MAX_ORDER + 1];
        hashes[0] = 0;
        const int32_t deepest = std::min(available, max_order());
        for (int32_t age = 0; age < deepest; ++age) hashes[age + 1] = hash_more(hashes[age], window[age]);
        for (auto table = tables.rbegin(); table != tables.rend() && table->order >= floor_order; ++table) {
            if (table->order > available) continue;
            const int64_t entry = table->find(hashes[table->order], window);
            if (entry < 0) continue;
            const Law law = table->law(entry);
            if (law.size > 0) return law;
        }
        return Law();
    }

    // The same, copied out.
    Law copy_longest(const int32_t* window, int32_t available, int32_t floor_order, std::vector<int32_t>& token_ids,
                     std::vector<float>& probabilities) const {
        const std::lock_guard<std::mutex> guard(mutex);
        const Law law = longest(window, available, floor_order);
        token_ids.assign(law.token_ids, law.token_ids + law.size);
        probabilities.assign(law.probabilities, law.probabilities + law.size);
        return law;
    }

   private:
    static constexpr int32_t FEW = 64;
    std::vector<std::pair<int32_t, double>> merged_;
    std::unordered_map<int32_t, size_t> places_;  // of merged_, by token; where more than FEW are merged

    // STAND's moving average with a floor: the (k+1)-th observation weighs max(1 / (k + 1), min_rate), tokens that it
    // does not name count as 0, and the best num_candidates tokens stay.
    void blend(OrderTable& table, int64_t entry, const int32_t* ids, const float* probs, int32_t width) {
        const double count = table.counts[entry];
        const double rate = count == 0 ? 1.0 : std::max(1.0 / (count + 1.0), min_rate);
        int32_t* kept_ids = table.top_ids.data() + entry * num_candidates;
        float* kept_probs = table.top_probs.data() + entry * num_candidates;
        merged_.clear();
        for (int32_t slot = 0; slot < num_candidates && kept_ids[slot] != NO_TOKEN; ++slot)
            merged_.emplace_back(kept_ids[slot], (1.0 - rate) * kept_probs[slot]);
        places_.clear();
        for (size_t place = 0; width > FEW && place < merged_.size(); ++place) places_[merged_[place].first] = place;
        for (int32_t slot = 0; slot < width; ++slot)
            if (ids[slot] != NO_TOKEN) merged_[place_of(ids[slot], width)].second += rate * probs[slot];
        keep_best(kept_ids, kept_probs);
        if (table.counts[entry] < std::numeric_limits<uint32_t>::max()) ++table.counts[entry];
    }

    // Where a token's mass adds up. A search is quicker than a table for few entries, but takes the square of many.
    size_t place_of(int32_t token_id, int32_t width) {
        size_t place = 0;
        if (width > FEW)
            place = places_.try_emplace(token_id, merged_.size()).first->second;
        else
            while (place < merged_.size() && merged_[place].first != token_id) ++place;
        if (place == merged_.size()) merged_.emplace_back(token_id, 0.0);
        return place;
    }

    void keep_best(int32_t* kept_ids, float* kept_probs) {
        for (auto& candidate : merged_) candidate.second = static_cast<float>(candidate.second);
        std::sort(merged_.begin(), merged_.end(), [](const auto& left, const auto& right) {
            return left.second != right.second ? left.second > right.second : left.first < right.first;
        });
        for (int32_t slot = 0; slot < num_candidates; ++slot) {
            const bool filled = slot < static_cast<int32_t>(merged_.size()) && merged_[slot].second > 0.0;
            kept_ids[slot] = filled ? merged_[slot].first : NO_TOKEN;
            kept_probs[slot] = filled ? static_cast<float>(merged_[slot].second) : 0.0f;
        }
    }
};

// Fills the tables of an empty lookup from stored arrays; false where the arrays break an invariant.
inline bool restore_table(OrderTable& table, int64_t num_contexts, const int32_t* keys, const uint32_t* counts,
                          const int32_t* top_ids, const float* top_probs) {
    const int32_t order = table.order, width = table.num_candidates;
    for (int64_t entry = 0; entry < num_contexts; ++entry) {
        const int32_t* window = keys + entry * order;
        const int32_t* ids = top_ids + entry * width;
        const float* probs = top_probs + entry * width;
        uint64_t hash = 0;
        for (int32_t age = 0; age < order; ++age) {
            if (window[age] < 0) return false;
            hash = hash_more(hash, window[age]);
        }
        if (counts[entry] == 0) return false;
        bool padding = false;
        for (int32_t slot = 0; slot < width; ++slot) {
            padding |= ids[slot] == NO_TOKEN;
            if (padding ? ids[slot] != NO_TOKEN || probs[slot] != 0.0f : ids[slot] < 0) return false;
            if (!padding && !(probs[slot] > 0.0f && probs[slot] <= std::numeric_limits<float>::max())) return false;
            if (slot > 0 && probs[slot] > probs[slot - 1]) return false;
            for (int32_t earlier = 0; !padding && earlier < slot; ++earlier)
                if (ids[earlier] == ids[slot]) return false;
        }
        if (table.find_or_add(hash, window) != entry) return false;
        table.counts[entry] = counts[entry];
        std::copy(ids, ids + width, table.top_ids.begin() + entry * width);
        std::copy(probs, probs + width, table.top_probs.begin() + entry * width);
    }
    return true;
}

}  // namespace stand
