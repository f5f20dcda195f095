// What the children of nodes are drawn from. All nodes share arrays that later drafts use again: lists of their own
// took a quarter of a sampled draft's time to make and to give back.

#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "../../include/noise.h"
#include "../../include/sampling.h"
#include "blender.h"

namespace stand {

class Candidates {
   public:
    // A token that may become a child. It is drawn by its weight, in the race of sampling.h. Where it is taken its
    // weight is 0, so sums and races need not ask.
    struct Entry {
        double arrival;  // of a set whose race has begun
        uint32_t token;
        float probability, weight;
    };

    void forget() {
        sets_.clear();
        entries_.clear();
        laws_.clear();
    }

    // The set of one node, in descending probability; returns its number.
    int32_t add(const std::vector<Candidate>& best, bool is_sharpened) {
        sets_.push_back(Set{static_cast<int32_t>(entries_.size()), static_cast<int32_t>(best.size()), false});
        for (const Candidate& found : best) {
            const float weight = is_sharpened ? sharpened(found.probability) : found.probability;
            entries_.push_back(Entry{0.0, found.token, found.probability, weight});
        }
        return static_cast<int32_t>(sets_.size()) - 1;
    }

    int32_t size(int32_t set) const { return sets_[set].size; }
    Entry* of(int32_t set) { return entries_.data() + sets_[set].first; }
    const Entry* of(int32_t set) const { return entries_.data() + sets_[set].first; }

    // The law of the set's next child, over all its entries: those not yet taken, renormalised. Returns where it lies.
    int32_t add_law(int32_t set) {
        const Entry* entries = of(set);
        const int32_t place = static_cast<int32_t>(laws_.size()), count = size(set);
        double mass = 0.0;  // summed, because a subtraction would lose small weights
        for (int32_t i = 0; i < count; ++i) mass += entries[i].weight;
        laws_.resize(place + count);
        for (int32_t i = 0; i < count; ++i) laws_[place + i] = static_cast<float>(entries[i].weight / mass);
        return place;
    }
    const float* law(int32_t place) const { return laws_.data() + place; }

    // Takes the next to arrive of the entries that are not taken, one of which must have weight, and returns its
    // number. `key`, `node`: of the noise.
    int32_t draw(int32_t set, uint64_t key, int32_t node) {
        if (!sets_[set].is_running) start(set, key, node);
        Entry* entries = of(set);
        int32_t winner = 0;
        for (int32_t i = 1; i < size(set); ++i) winner = entries[i].arrival < entries[winner].arrival ? i : winner;
        take(entries[winner]);
        return winner;
    }

    static void take(Entry& entry) {
        entry.weight = 0.0f;
        entry.arrival = NEVER;
    }

   private:
    struct Set {
        int32_t first, size;
        bool is_running;
    };
    std::vector<Set> sets_;
    std::vector<Entry> entries_;
    std::vector<float> laws_;
    static constexpr double NEVER = std::numeric_limits<double>::infinity();

    // What a sampled child is drawn by: sharper than the estimate. An estimate is a mean over what the target's law may
    // be. Where that is usually sure of one token but not always of the same, a draw that follows the mean misses more
    // often than the likeliest token would (LOG.md, "Sharper than the estimate").
    static float sharpened(float probability) { return probability * std::sqrt(probability); }

    void start(int32_t set, uint64_t key, int32_t node) {
        Entry* entries = of(set);
        for (int32_t i = 0; i < size(set); ++i)
            entries[i].arrival = entries[i].weight > 0.0f ? arrival(entries[i].weight, uniform(key, node, i)) : NEVER;
        sets_[set].is_running = true;
    }
};

}  // namespace stand
