// How much a law from outside counts beside the contexts: odds per bucket, learned while decoding, one set per source.
//
// The law is one more member in front of the chain of odds.h. With it a node's law is
// Q(x) = (p_x f_x + e * P(x)) / (sum of p f + e): `p_x` is the head's probability, `f_x` the learned factor of its
// bucket (depth, rank, probability, and what the longest context says of this token), P the contexts' law, and `e` the
// learned odds of going on to the contexts (depth, the head's largest probability, how sure the longest context is, and
// whether the two agree) times those of the depth alone.
//
// Gradients fade as a bad head's share does, so it would linger. Therefore children come from g Q + (1 - g) P, where g
// is the posterior belief that Q is the better law: Bayes' rule over everything observed, with bounds, so that a head
// which becomes useful is noticed (a fixed share would do the same; Herbster and Warmuth 1998).
//
// Contexts learn as if there were no head. So a head that is of no use, or that goes away, leaves the lookup as it was.

#pragma once

#include "odds.h"
#include "outside_laws.h"

namespace stand {

class OutsideOdds {
   public:
    // The odds of a law's tokens and of going on, and the belief in both.
    struct Reading {
        int32_t size, source;
        int32_t trust, escape_bucket;
        int32_t buckets[MAX_LAW_SIZE];
        float odds[MAX_LAW_SIZE];
        float escape, total, belief;
    };

    OutsideOdds() { clear(); }

    void clear() {
        for (Table& table : tables_) table = Table();
    }

    // `longest`: the longest context that knows what follows, or null.
    void read(const OutsideLaw& law, const Block* longest, Reading& reading) const {
        const Table& table = tables_[law.source];
        const int32_t depth = std::min(law.depth, NUM_DEPTHS - 1);
        const int32_t heaviest = longest == nullptr ? -1 : heaviest_entry(longest);
        const int32_t first_view = law.size == 0 ? UNKNOWN : view_of(longest, heaviest, law.tokens[0]);
        reading.size = law.size;
        reading.source = law.source;
        reading.total = 0.0f;
        for (int32_t i = 0; i < law.size; ++i) {
            const int32_t view = i == 0 ? first_view : view_of(longest, heaviest, law.tokens[i]);
            const int32_t kind = (depth * NUM_RANKS + std::min(i, NUM_RANKS - 1)) * NUM_VIEWS + view;
            reading.buckets[i] = kind * NUM_CHANCES + chance_bucket(law.probabilities[i]);
            reading.odds[i] = law.probabilities[i] * table.entry[reading.buckets[i]];
            reading.total += reading.odds[i];
        }
        const int32_t top = law.size == 0 ? 0 : top_bucket(law.probabilities[0]);
        reading.trust = depth;
        reading.escape_bucket =
            ((depth * NUM_TOPS + top) * NUM_SURETIES + surety_of(longest, heaviest)) * NUM_VIEWS + first_view;
        reading.escape = table.trust[depth] * table.escape[reading.escape_bucket];
        reading.total += reading.escape;
        reading.belief = 1.0f / (1.0f + std::exp(-table.evidence));
    }

    // One gradient step: what each of a law's tokens gained, and what the contexts gained, of the mass that was
    // observed. `evidence`: by how much Q's log likelihood of it was above that of P. Where that is no number nothing
    // is learned.
    void train(const Reading& reading, const float* gained, float escaped, float mass, float evidence, float rate) {
        if (!std::isfinite(evidence)) return;
        Table& table = tables_[reading.source];
        table.evidence = std::clamp(table.evidence + evidence, -MOST_EVIDENCE, MOST_EVIDENCE);
        const float step = rate * (escaped - mass * reading.escape / reading.total);
        move_odds(table.trust[reading.trust], table.trust_uses[reading.trust], mass, step);
        move_odds(table.escape[reading.escape_bucket], table.escape_uses[reading.escape_bucket], mass, step);
        for (int32_t i = 0; i < reading.size; ++i) {
            const int32_t bucket = reading.buckets[i];
            const float share = rate * (gained[i] - mass * reading.odds[i] / reading.total);
            move_odds(table.entry[bucket], table.entry_uses[bucket], mass / reading.size, share);
        }
    }

   private:
    static constexpr int32_t NUM_DEPTHS = 4, NUM_RANKS = 2, NUM_VIEWS = 3, NUM_CHANCES = 12;
    static constexpr int32_t NUM_TOPS = 6, NUM_LENGTHS = 5, NUM_SURETIES = 2 * NUM_LENGTHS + 1;
    static constexpr int32_t NUM_ENTRIES = NUM_DEPTHS * NUM_RANKS * NUM_VIEWS * NUM_CHANCES;
    static constexpr int32_t NUM_ESCAPES = NUM_DEPTHS * NUM_TOPS * NUM_SURETIES * NUM_VIEWS;
    static constexpr float MOST_EVIDENCE = 5.0f;
    static constexpr int32_t UNKNOWN = 0, KNOWN = 1, HEAVIEST = 2;  // views of the longest context on a token

    struct Table {
        float entry[NUM_ENTRIES], escape[NUM_ESCAPES], trust[NUM_DEPTHS];
        float evidence = 0.0f;  // log odds of the belief
        float entry_uses[NUM_ENTRIES] = {}, escape_uses[NUM_ESCAPES] = {}, trust_uses[NUM_DEPTHS] = {};

        Table() {
            std::fill(entry, entry + NUM_ENTRIES, 1.0f);
            std::fill(trust, trust + NUM_DEPTHS, 1.0f);
            for (int32_t bucket = 0; bucket < NUM_ESCAPES; ++bucket) escape[bucket] = escape_prior(bucket);
        }
    };
    Table tables_[NUM_SOURCES];

    // By how sure the longest context is: nothing known, then by its length, without and with a likely successor.
    static float escape_prior(int32_t bucket) {
        constexpr float BY_SURETY[NUM_SURETIES] = {0.3f, 0.5f, 0.7f, 0.7f, 1.0f, 1.0f, 2.0f, 1.0f, 3.0f, 1.5f, 4.0f};
        constexpr float BY_TOP[NUM_TOPS] = {2.0f, 1.0f, 0.7f, 0.5f, 0.25f, 0.1f};
        const int32_t surety = bucket / NUM_VIEWS % NUM_SURETIES, top = bucket / (NUM_VIEWS * NUM_SURETIES) % NUM_TOPS;
        return BY_SURETY[surety] * BY_TOP[top];
    }

    // Half octaves below 1.
    static int32_t chance_bucket(float probability) {
        const uint32_t bits = float_bits(std::min(probability, 1.0f));
        const int32_t half_octaves = static_cast<int32_t>(((127u << 23) - bits) >> 22);
        return std::min(half_octaves, NUM_CHANCES - 1);
    }

    static int32_t top_bucket(float probability) {
        return (probability >= 0.25f) + (probability >= 0.5f) + (probability >= 0.8f) + (probability >= 0.95f) +
               (probability >= 0.99f);
    }

    static int32_t heaviest_entry(const Block* block) {
        const uint16_t* weights = weights_of(block);
        int32_t heaviest = 0;
        for (int32_t i = 1; i < block->size; ++i)
            if (weights[i] > weights[heaviest]) heaviest = i;
        return heaviest;
    }

    static int32_t view_of(const Block* longest, int32_t heaviest, uint32_t token) {
        if (longest == nullptr) return UNKNOWN;
        const int32_t position = find_entry(longest, token);
        return position < 0 ? UNKNOWN : position == heaviest ? HEAVIEST : KNOWN;
    }

    static int32_t surety_of(const Block* longest, int32_t heaviest) {
        if (longest == nullptr) return 0;
        uint32_t total = 0;
        for (int32_t i = 0; i < longest->size; ++i) total += weights_of(longest)[i];
        const int32_t order = order_of(longest);
        const int32_t length = (order >= 2) + (order >= 3) + (order >= 5) + (order >= 9);
        return 1 + 2 * length + (share_bucket(weights_of(longest)[heaviest], total) >= 2);
    }
};

// What the target's law says about a law from outside at the same node: one step on log P for all of it.
class OutsideLesson {
   public:
    OutsideLesson(OutsideOdds& odds, const OutsideLaw& law, const Block* longest) : odds_(odds), law_(law) {
        odds.read(law, longest, reading_);
    }

    // The target gives a token this mass; the contexts gave it this chance.
    void observe(uint32_t token, float mass, float chance) {
        int32_t place = 0;
        while (place < law_.size && law_.tokens[place] != token) ++place;
        const float found = place < law_.size ? reading_.odds[place] : 0.0f;
        const float joint = found + reading_.escape * chance, own = found / joint;
        if (place < law_.size) gained_[place] += mass * own;
        escaped_ += mass * (1.0f - own);
        mass_ += mass;
        evidence_ += mass * std::log(joint / (reading_.total * chance));
    }

    void finish(float rate) {
        if (mass_ > 0.0f) odds_.train(reading_, gained_, escaped_, mass_, evidence_, rate);
    }

   private:
    OutsideOdds& odds_;
    const OutsideLaw law_;
    OutsideOdds::Reading reading_;
    float gained_[MAX_LAW_SIZE] = {};
    float escaped_ = 0.0f, mass_ = 0.0f, evidence_ = 0.0f;
};

}  // namespace stand
