// The law of the next token: the evidence of all contexts, blended along the chain of odds.h.

#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "evidence.h"
#include "masks.h"
#include "../store/lookup.h"

namespace stand {

struct Candidate {
    uint32_t token;
    float probability;
};

// Likelier, or as likely with the lower id.
inline bool is_better(const Candidate& left, const Candidate& right) {
    return left.probability != right.probability ? left.probability > right.probability : left.token < right.token;
}

// The law of the empty context, by scope. It is read once for all nodes of a draft, and only when the chain of a node
// comes that far.
class EmptyLaws {
   public:
    // The best first, up to half an octave: a full sort would take longer than to look at a few more.
    struct Law {
        uint8_t scope;
        int32_t size;
        Candidate candidates[MAX_ENTRIES];
    };

    void forget() { num_laws_ = 0; }

    const Law& of(const BlendedLookup& lookup, const Clock& clock) {
        for (size_t i = 0; i < num_laws_; ++i)
            if (laws_[i].scope == clock.scope) return laws_[i];
        if (num_laws_ == laws_.size()) laws_.emplace_back();
        Law& law = laws_[num_laws_++];
        law.scope = clock.scope;
        read(lookup, clock, law);
        return law;
    }

   private:
    static constexpr int32_t NUM_BINS = 32;  // half octaves below 1
    std::vector<Law> laws_;
    size_t num_laws_ = 0;  // the others are kept for their memory

    static void read(const BlendedLookup& lookup, const Clock& clock, Law& law) {
        law.size = 0;
        if (lookup.empty_context() == 0) return;
        const Block* block = lookup.arena.at(lookup.empty_context());
        if (block->size == 0) return;
        uint16_t buckets[MAX_ENTRIES];
        float probabilities[MAX_ENTRIES];
        int32_t ends[NUM_BINS + 1] = {};
        law.size = block->size;
        float total = lookup.odds.escape[read_buckets(block, clock, buckets)];
        for (int32_t i = 0; i < law.size; ++i) total += lookup.odds.entry[buckets[i]];
        for (int32_t i = 0; i < law.size; ++i) {
            probabilities[i] = lookup.odds.entry[buckets[i]] / total;
            ++ends[bin_of(probabilities[i]) + 1];
        }
        for (int32_t bin = 1; bin <= NUM_BINS; ++bin) ends[bin] += ends[bin - 1];
        for (int32_t i = 0; i < law.size; ++i)
            law.candidates[ends[bin_of(probabilities[i])]++] = Candidate{tokens_of(block)[i], probabilities[i]};
    }

    static int32_t bin_of(float probability) {
        return std::min<int32_t>(((127u << 23) - float_bits(probability)) >> 22, NUM_BINS - 1);
    }
};

// The blended law of the next token after some contexts, in no particular order.
class Blender {
   public:
    int32_t size = 0;
    uint32_t tokens[MOST_PIECES];
    float probabilities[MOST_PIECES];

    // Contexts that could add less than `least` to any token are not asked, entries that add less than `cut` are left
    // out. `outside`: a law from outside of the lookup, weighed by `odds`, or null.
    void blend(const BlendedLookup& lookup, const Contexts& contexts, const Clock& clock, float least, float cut,
               EmptyLaws& empty, const OutsideLaw* outside = nullptr, const OutsideOdds* odds = nullptr) {
        float carry = 1.0f;
        evidence_.clear();
        if (outside != nullptr) carry = collect(lookup, contexts, *outside, *odds, cut);
        for (int32_t order = contexts.longest; order >= 1 && carry >= least; --order)
            carry = collect(lookup, contexts.blocks[order], clock, carry, cut);
        if (carry >= least) carry = collect(lookup, contexts.skip, clock, carry, cut);
        if (carry * LIKELIEST >= least) collect(empty.of(lookup, clock), carry, cut);
        merge();
    }

    // Leaves out tokens that the mask forbids; the others share what those had. Where few tokens may follow, those that
    // no evidence speaks for share what it leaves.
    void restrict(const TokenMask& mask) {
        float kept = 0.0f, lost = 0.0f;
        int32_t count = 0, num_told = 0;
        for (int32_t i = 0; i < size; ++i) {
            if (!mask.allows(tokens[i])) {
                lost += probabilities[i];
                continue;
            }
            kept += probabilities[i];
            num_told += mask.tells_of(tokens[i]);
            tokens[count] = tokens[i];
            probabilities[count++] = probabilities[i];
        }
        size = count;
        float unknown = std::max(1.0f - kept - lost, LEAST_UNKNOWN);
        const int32_t num_allowed = mask.count(FEW + 1);
        if (num_allowed <= FEW && num_allowed > num_told)
            add_unknown(mask, unknown / (num_allowed - num_told));
        else if (num_allowed <= FEW && num_told == count)
            unknown = 0.0f;  // nothing else may follow
        for (int32_t i = 0; i < size; ++i) probabilities[i] /= kept + unknown;
    }

    // The best `limit` in descending probability (ties: lowest token), valid until the next call.
    const std::vector<Candidate>& best(int32_t limit) {
        const int32_t kept = std::min(limit, size);
        ranks_.resize(size);
        for (int32_t i = 0; i < size; ++i)  // positive floats compare like their bits
            ranks_[i] = static_cast<uint64_t>(float_bits(probabilities[i])) << 32 | (0xFFFFFFFFu - tokens[i]);
        std::partial_sort(ranks_.begin(), ranks_.begin() + kept, ranks_.end(), std::greater<uint64_t>());
        best_.resize(kept);
        for (int32_t i = 0; i < kept; ++i)
            best_[i] = Candidate{0xFFFFFFFFu - static_cast<uint32_t>(ranks_[i]), float_of_bits(ranks_[i] >> 32)};
        return best_;
    }

    // The best alone; `size` must be positive.
    Candidate first() const {
        Candidate found{tokens[0], probabilities[0]};
        for (int32_t i = 1; i < size; ++i)
            if (is_better(Candidate{tokens[i], probabilities[i]}, found)) found = {tokens[i], probabilities[i]};
        return found;
    }

   private:
    static constexpr int32_t FEW = 8;
    static constexpr float LEAST_UNKNOWN = 1e-3f;  // of a law: what evidence leaves to tokens that it does not name
    static constexpr float LIKELIEST = 0.1f;  // the empty context gives hardly any token more
    static constexpr uint32_t SLOT_BITS = 10, NUM_SLOTS = 1u << SLOT_BITS;
    static_assert(NUM_SLOTS > MOST_PIECES, "a slot must stay free");
    struct Slot {
        uint32_t token = 0;
        uint16_t epoch = 0, index = 0;
    };
    Slot slots_[NUM_SLOTS];
    uint16_t epoch_ = 0;
    Evidence evidence_;
    std::vector<uint64_t> ranks_;
    std::vector<Candidate> best_;

    // Returns what is left for the contexts.
    [[gnu::noinline]] float collect(const BlendedLookup& lookup, const Contexts& contexts, const OutsideLaw& law,
                                    const OutsideOdds& odds, float cut) {
        OutsideOdds::Reading reading;
        odds.read(law, longest_known(lookup.arena, contexts.blocks, contexts.longest), reading);
        const float scale = reading.belief / reading.total;
        for (int32_t i = 0; i < reading.size; ++i)
            if (scale * reading.odds[i] >= cut) evidence_.add(law.tokens[i], scale * reading.odds[i]);
        return 1.0f - reading.belief + scale * reading.escape;
    }

    // Returns what is left for shorter contexts.
    float collect(const BlendedLookup& lookup, uint32_t reference, const Clock& clock, float carry, float cut) {
        const Block* block = lookup.arena.at(reference);
        if (reference == 0 || block->size == 0) return carry;
        lookup.arena.fetch<1>(children_of(block)[0]);  // likely the next to be looked at
        return evidence_.collect(block, clock, lookup.odds, carry, cut);
    }

    void collect(const EmptyLaws::Law& law, float carry, float cut) {
        for (int32_t i = 0; i < law.size && carry * law.candidates[i].probability >= cut; ++i)
            evidence_.add(law.candidates[i].token, carry * law.candidates[i].probability);
    }

    // Adds the tokens that the mask allows and no evidence speaks for.
    void add_unknown(const TokenMask& mask, float probability) {
        const uint32_t *first = tokens, *last = tokens + size;
        mask.each([&](uint32_t token) {
            if (std::find(first, last, token) != last) return;
            tokens[size] = token;
            probabilities[size++] = probability;
        });
    }

    // Adds up the evidence for each token.
    void merge() {
        if (++epoch_ == 0) {
            std::fill(slots_, slots_ + NUM_SLOTS, Slot());
            epoch_ = 1;
        }
        size = 0;
        for (int32_t i = 0; i < evidence_.size; ++i) add(evidence_.tokens[i], evidence_.probabilities[i]);
    }

    // Without a branch on whether the token is new, which is hard to predict.
    void add(uint32_t token, float probability) {
        uint32_t place = token * 2654435761u >> (32 - SLOT_BITS);
        while ((slots_[place].epoch == epoch_) & (slots_[place].token != token)) place = (place + 1) & (NUM_SLOTS - 1);
        Slot& slot = slots_[place];
        const bool is_new = slot.epoch != epoch_;
        const uint32_t keep = static_cast<uint32_t>(is_new) - 1;  // all bits or none
        const uint32_t index = (slot.index & keep) | (static_cast<uint32_t>(size) & ~keep);
        slot.token = token;
        slot.epoch = epoch_;
        slot.index = static_cast<uint16_t>(index);
        tokens[index] = token;
        probabilities[index] = float_of_bits(float_bits(probabilities[index]) & keep) + probability;
        size += is_new;
    }
};

// The blended law after a window of tokens: the best `limit` tokens in descending probability.
inline std::vector<Candidate> blended_law(const BlendedLookup& lookup, const uint32_t* window, int32_t available,
                                          uint8_t scope, int32_t limit) {
    const std::lock_guard guard(lookup.mutex);
    Blender blender;
    EmptyLaws empty;
    const Contexts contexts = lookup.locate<Contexts>(window, available);
    blender.blend(lookup, contexts, Clock{lookup.clock.now, scope}, 0.0f, 0.0f, empty);
    return blender.best(limit);
}

}  // namespace stand
