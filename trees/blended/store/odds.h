// How much a context's evidence counts: odds per bucket, learned while decoding.
//
// A context of order n predicts P_n(x) = (a_x + e * P_{n-1}(x)) / (sum of a + e): `a_x` is the odds of the bucket that
// entry x falls into (order, faded weight, age, rank), `e` the odds of escaping to the next shorter context (order,
// number of entries, visits, share of the heaviest entry, age). One step of exponentiated gradient on log P of every
// observed token, longer while a bucket is young, keeps both tables calibrated. It is the escape estimation of PPM
// (Cleary and Witten 1984) with every discount learned, and the mixing weight of context-mixing compressors (PAQ,
// Mahoney 2005) in one chain. Below order 1 the chain goes on with contexts that do not know the newest token.

#pragma once

#include <cmath>
#include <initializer_list>
#include <iterator>

#include "blocks.h"
#include "float_bits.h"

namespace stand {

constexpr int32_t MAX_DEPTH = 12;  // longest context
constexpr int32_t SKIP = MAX_DEPTH + 1;  // "order" of the context that is the token before the newest
constexpr int32_t NUM_ORDERS = MAX_DEPTH + 2;  // 0 (no token at all), 1 to MAX_DEPTH, SKIP
constexpr int32_t WEIGHT_ONE = 4096;
constexpr float UNSEEN = 1e-5f;  // of any token where no context knows it
constexpr float LEAST_CHANCE = 1e-30f;  // of any token; very sure contexts would make it 0, and 0 / 0 teaches nothing

constexpr int32_t NUM_WEIGHTS = 16, NUM_AGES = 3, NUM_RANKS = 3;
constexpr int32_t NUM_SIZES = 6, NUM_VISITS = 8, NUM_SHARES = 4;
constexpr int32_t ENTRY_BUCKETS = NUM_WEIGHTS * NUM_AGES * NUM_RANKS;                // per order
constexpr int32_t ESCAPE_BUCKETS = NUM_SIZES * NUM_VISITS * NUM_SHARES * NUM_AGES;  // per order

constexpr int32_t STAMP_SHIFT = 4;                   // a stamp is 16 learned tokens
constexpr uint16_t RECENT = 128 >> STAMP_SHIFT;      // seen within so many stamps
constexpr uint8_t LOADED_SCOPE = 255;                // of everything that came from a file

// The order to ask where this one fails: one token less, below order 1 the token before the newest, then no token.
inline int32_t next_order(int32_t order) { return order == 1 ? SKIP : order == SKIP ? 0 : order - 1; }

// A table holds the contexts that are one token: the newest one, or the one before it.
constexpr int32_t ONE_TOKEN_ORDERS[] = {1, SKIP};
inline bool is_one_token(int32_t order) { return order == 1 || order == SKIP; }
inline bool may_have_longer(int32_t order) { return order != 0 && order != SKIP; }

// Time and place of learning: tokens learned so far, and whatever the caller calls a scope (a problem, a user).
struct Clock {
    uint32_t now = 0;
    uint8_t scope = 0;

    uint16_t stamp() const { return static_cast<uint16_t>(now >> STAMP_SHIFT); }
    // 0: seen in this scope and recently, 1: in this scope, 2: elsewhere.
    int32_t age(uint16_t stamp_then, uint8_t scope_then) const {
        const int32_t is_old = static_cast<uint16_t>(stamp() - stamp_then) >= RECENT;
        return scope_then != scope ? 2 : is_old;
    }
};

constexpr int32_t FIRST_HALF_OCTAVE = 2 * (127 + 8);  // of a float of WEIGHT_ONE / 16

// Half octaves from 1/16 to 16: exponent and first digit of the weight as a float.
inline int32_t weight_bucket(uint16_t weight) {
    return std::max(0, static_cast<int32_t>(float_bits(weight) >> 22) - FIRST_HALF_OCTAVE);
}

// Buckets of features that are small numbers, as tables: which comparison holds is hard to predict.
struct FeatureBuckets {
    uint8_t of_size[MAX_ENTRIES + 1] = {};
    uint8_t of_visits[256] = {};

    constexpr FeatureBuckets() {
        for (int32_t size = 1; size <= MAX_ENTRIES; ++size)
            for (const int32_t least : {2, 3, 4, 8, 16}) of_size[size] += size >= least;
        for (int32_t visits = 1; visits < 256; ++visits)
            for (const int32_t least : {2, 3, 4, 6, 10, 24, 64}) of_visits[visits] += visits >= least;
    }
};
inline constexpr FeatureBuckets FEATURE_BUCKETS;

inline int32_t share_bucket(uint32_t heaviest, uint32_t total) {
    return (10 * heaviest > 4 * total) + (10 * heaviest > 7 * total) + (20 * heaviest > 19 * total);
}

// The weights of one order, age and rank are neighbours.
inline int32_t entry_bucket(int32_t order, int32_t weight, int32_t age, int32_t rank) {
    return ((order * NUM_RANKS + rank) * NUM_AGES + age) * NUM_WEIGHTS + weight;
}

inline int32_t escape_bucket(const Block* block, int32_t share, int32_t latest_age) {
    const int32_t size = FEATURE_BUCKETS.of_size[block->size], visits = FEATURE_BUCKETS.of_visits[block->visits];
    return (((order_of(block) * NUM_SIZES + size) * NUM_VISITS + visits) * NUM_SHARES + share) * NUM_AGES + latest_age;
}

// The buckets of eight entries from `first` on, as if none were in front: as vectors, since compilers do not make them
// of a loop. Beyond the block's last entry they mean nothing, but what is read there is the arena's.
inline void read_eight(const Block* block, int32_t first, const Clock& clock, uint16_t* buckets) {
    using Byte8 = uint8_t __attribute__((vector_size(8)));
    using Short8 = int16_t __attribute__((vector_size(16)));
    using Unsigned8 = uint16_t __attribute__((vector_size(16)));
    using Int8 = int32_t __attribute__((vector_size(32)));
    using Float8 = float __attribute__((vector_size(32)));
    Unsigned8 weights, stamps;
    Byte8 scopes;
    std::memcpy(&weights, weights_of(block) + first, sizeof weights);
    std::memcpy(&stamps, stamps_of(block) + first, sizeof stamps);
    std::memcpy(&scopes, scopes_of(block) + first, sizeof scopes);
    const Float8 values = __builtin_convertvector(weights, Float8);
    Int8 bits;
    std::memcpy(&bits, &values, sizeof bits);
    bits = (bits >> 22) - FIRST_HALF_OCTAVE;
    const Short8 weight_buckets = __builtin_convertvector(bits & ~(bits >> 31), Short8);
    const Short8 is_old = (clock.stamp() - stamps) >= RECENT;
    const Short8 is_elsewhere = __builtin_convertvector(scopes != clock.scope, Short8);
    const Short8 ages = (is_elsewhere & 2) | (is_old & ~is_elsewhere & 1);
    const int16_t base = static_cast<int16_t>(entry_bucket(order_of(block), 0, 0, 0));
    const Short8 result = base + ages * NUM_WEIGHTS + weight_buckets;
    std::memcpy(buckets + first, &result, sizeof result);
}

// Fills in the bucket of a context's only entry, and returns that of its escape.
inline int32_t read_only_bucket(const Block* block, const Clock& clock, uint16_t* bucket) {
    const uint16_t weight = weights_of(block)[0];
    const int32_t age = clock.age(stamps_of(block)[0], scopes_of(block)[0]);
    *bucket = static_cast<uint16_t>(entry_bucket(order_of(block), weight_bucket(weight), age, 2));
    return escape_bucket(block, (weight > 0) * (NUM_SHARES - 1), age);
}

// Fills in the bucket of every entry of a block that is not empty, and returns that of its escape. `buckets` has room
// for MAX_ENTRIES.
inline int32_t read_buckets(const Block* block, const Clock& clock, uint16_t* buckets) {
    const int32_t size = block->size;
    if (size == 1) return read_only_bucket(block, clock, buckets);  // most contexts
    const uint16_t* weights = weights_of(block);
    for (int32_t first = 0; first < size; first += 8) read_eight(block, first, clock, buckets);
    uint32_t total = 0, heaviest = 0;
    for (int32_t i = 0; i < size; ++i) {
        total += weights[i];
        heaviest = std::max<uint32_t>(heaviest, weights[i]);
    }
    buckets[0] += entry_bucket(0, 0, 0, 1 + (weights[0] >= heaviest));
    const int32_t latest_age = clock.age(stamps_of(block)[0], scopes_of(block)[0]);
    return escape_bucket(block, share_bucket(heaviest, total), latest_age);
}

// Start values: logarithms, summed over the features of a bucket. Fitted on trajectories of six model families.
namespace prior {
constexpr float ENTRY = -2.32f, ESCAPE = 0.76f;
constexpr float ENTRY_ORDER[] = {-0.1f, 0.0f, 0.04f, -0.03f, -0.21f, -0.21f, -0.22f, -0.13f, -0.07f, -0.24f};
constexpr float ENTRY_WEIGHT[NUM_WEIGHTS] = {0.0f, 0.44f, 0.47f, 0.6f,  0.85f, 0.95f, 1.12f, 1.37f,
                                             1.5f, 2.51f, 3.04f, 3.49f, 3.88f, 4.31f, 4.74f, 5.22f};
constexpr float ENTRY_AGE[NUM_AGES] = {0.0f, -0.12f, -0.89f};
constexpr float ENTRY_RANK[NUM_RANKS] = {0.0f, 0.74f, 0.27f};
constexpr float ESCAPE_ORDER[] = {1.58f, 0.0f, 0.81f, 1.06f, 1.06f, 1.21f, 1.32f, 1.43f, 0.98f, 0.23f};
constexpr float ESCAPE_SIZE[NUM_SIZES] = {0.0f, 0.73f, 0.67f, 0.59f, 0.56f, 0.88f};
constexpr float ESCAPE_VISITS[NUM_VISITS] = {0.0f, -0.42f, -0.52f, -0.3f, -0.18f, -0.06f, 0.05f, 0.02f};
constexpr float ESCAPE_SHARE[NUM_SHARES] = {0.0f, -0.6f, -0.92f, -1.05f};
constexpr float ESCAPE_AGE[NUM_AGES] = {0.0f, -0.1f, 0.2f};
constexpr int32_t NUM_LENGTHS = 9;  // 0 to 8: longer ones start like the longest, SKIP follows
}  // namespace prior

// Multiplies odds by about exp(step), by more while they are young: a new one's steps are 1 + EAGER times as long as a
// settled one's, and after YOUNG uses half of EAGER is left. `duty` is what this counts for as a use.
inline void move_odds(float& odds, float& uses, float duty, float step) {
    constexpr float EAGER = 3.0f, YOUNG = 10.0f;
    constexpr float LEAST_LEFT = 0.25f;  // of the odds after any one step
    const float eagerness = 1.0f + EAGER * YOUNG / (YOUNG + uses);
    odds = std::min(1e4f, std::max(1e-4f, odds * std::max(LEAST_LEFT, 1.0f + eagerness * step)));
    uses += duty;
}

struct Odds {
    float entry[NUM_ORDERS * ENTRY_BUCKETS];
    float escape[NUM_ORDERS * ESCAPE_BUCKETS];

    Odds() {
        for (int32_t bucket = 0; bucket < NUM_ORDERS * ENTRY_BUCKETS; ++bucket)
            entry[bucket] = std::exp(entry_prior(bucket));
        for (int32_t bucket = 0; bucket < NUM_ORDERS * ESCAPE_BUCKETS; ++bucket)
            escape[bucket] = std::exp(escape_prior(bucket));
    }

    void move_entry(int32_t bucket, float duty, float step) {
        move_odds(entry[bucket], entry_uses_[bucket], duty, step);
    }
    void move_escape(int32_t bucket, float duty, float step) {
        move_odds(escape[bucket], escape_uses_[bucket], duty, step);
    }

    // Marks all odds as learned at length: their steps are short from here on.
    void settle() {
        std::fill(std::begin(entry_uses_), std::end(entry_uses_), SETTLED);
        std::fill(std::begin(escape_uses_), std::end(escape_uses_), SETTLED);
    }

   private:
    static constexpr float SETTLED = 1e6f;  // uses

    float entry_uses_[NUM_ORDERS * ENTRY_BUCKETS] = {}, escape_uses_[NUM_ORDERS * ESCAPE_BUCKETS] = {};

    static int32_t order_index(int32_t order) {
        return order == SKIP ? prior::NUM_LENGTHS : std::min(order, prior::NUM_LENGTHS - 1);
    }

    static float entry_prior(int32_t bucket) {
        const int32_t weight = bucket % NUM_WEIGHTS, age = bucket / NUM_WEIGHTS % NUM_AGES;
        const int32_t rank = bucket / (NUM_WEIGHTS * NUM_AGES) % NUM_RANKS;
        return prior::ENTRY + prior::ENTRY_ORDER[order_index(bucket / ENTRY_BUCKETS)] + prior::ENTRY_WEIGHT[weight] +
               prior::ENTRY_AGE[age] + prior::ENTRY_RANK[rank];
    }

    static float escape_prior(int32_t bucket) {
        const int32_t age = bucket % NUM_AGES, share = bucket / NUM_AGES % NUM_SHARES;
        const int32_t visits = bucket / (NUM_AGES * NUM_SHARES) % NUM_VISITS;
        const int32_t size = bucket / (NUM_AGES * NUM_SHARES * NUM_VISITS) % NUM_SIZES;
        return prior::ESCAPE + prior::ESCAPE_ORDER[order_index(bucket / ESCAPE_BUCKETS)] + prior::ESCAPE_SIZE[size] +
               prior::ESCAPE_VISITS[visits] + prior::ESCAPE_SHARE[share] + prior::ESCAPE_AGE[age];
    }
};

}  // namespace stand
