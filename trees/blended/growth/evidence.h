// The evidence of single contexts for the next token, collected one context after the other along the chain of odds.h.
//
// There are two ways with the same result to the bit, so that drafts do not depend on the machine: one for every
// processor, and one for AVX-512, where the odds of sixteen entries are looked up within registers.

#pragma once

#include <cstdlib>

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns of what its own header leaves undefined on purpose
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#define STAND_WIDE [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,bmi2,popcnt")]]
#endif

#include "../store/outside_odds.h"

namespace stand {

// Does this processor have what STAND_WIDE needs? No, where the environment has STAND_PORTABLE.
inline bool has_wide_vectors() {
#ifdef STAND_WIDE
    static const bool answer = std::getenv("STAND_PORTABLE") == nullptr && __builtin_cpu_supports("avx512f") &&
                               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("bmi2") &&
                               __builtin_cpu_supports("popcnt");
    return answer;
#else
    return false;
#endif
}

// Of one node: entries of all contexts, and a law from outside.
constexpr int32_t MOST_PIECES = MAX_ENTRIES * NUM_ORDERS + MAX_LAW_SIZE;

class Evidence {
   public:
    int32_t size = 0;  // pieces: one token may have several
    uint32_t tokens[MOST_PIECES + 16];
    float probabilities[MOST_PIECES + 16];

    void clear() { size = 0; }

    void add(uint32_t token, float probability) {
        tokens[size] = token;
        probabilities[size++] = probability;
    }

    // Takes up the entries of a context that is not empty and has at most WIDEST. They and what is left for shorter
    // contexts, which is returned, add up to `carry`; entries that get less than `cut` are left out.
    float collect(const Block* block, const Clock& clock, const Odds& odds, float carry, float cut) {
        if (block->size == 1) return collect_one(block, clock, odds, carry, cut);
#ifdef STAND_WIDE
        if (is_wide_) return collect_wide(block, clock, odds, carry, cut);
#endif
        return collect_any(block, clock, odds, carry, cut);
    }

    static constexpr int32_t WIDEST = 32;

   private:
    const bool is_wide_ = has_wide_vectors();

    float collect_one(const Block* block, const Clock& clock, const Odds& odds, float carry, float cut) {
        uint16_t bucket;
        const float escape = odds.escape[read_only_bucket(block, clock, &bucket)], value = odds.entry[bucket];
        const float scale = carry / (value + escape);
        const float probability = scale * value;
        tokens[size] = tokens_of(block)[0];
        probabilities[size] = probability;
        size += probability >= cut;
        return scale * escape;
    }

    float collect_any(const Block* block, const Clock& clock, const Odds& odds, float carry, float cut) {
        const int32_t num_entries = block->size;
        uint16_t buckets[MAX_ENTRIES];
        float sums[WIDEST] = {};
        const float escape = odds.escape[read_buckets(block, clock, buckets)];
        for (int32_t i = 0; i < num_entries; ++i) sums[i] = odds.entry[buckets[i]];
        // In the order in which vectors are summed up.
        fold<16>(sums, num_entries);
        fold<8>(sums, num_entries);
        fold<4>(sums, num_entries);
        fold<2>(sums, num_entries);
        const float scale = carry / (sums[0] + sums[1] + escape);
        const uint32_t* entries = tokens_of(block);
        int32_t next = size;
        for (int32_t i = 0; i < num_entries; ++i) {  // what is not kept leaves its place to the next: no branch
            const float probability = scale * odds.entry[buckets[i]];
            tokens[next] = entries[i];
            probabilities[next] = probability;
            next += probability >= cut;
        }
        size = next;
        return scale * escape;
    }

    // Adds the upper half to the lower one.
    template <int32_t HALF>
    static void fold(float* sums, int32_t size) {
        if (size > HALF)
            for (int32_t i = 0; i < HALF; ++i) sums[i] += sums[i + HALF];
    }

#ifdef STAND_WIDE
    static constexpr int32_t LANES = 16;

    // A block's entries, sixteen at a time; lanes beyond the last are 0.
    struct Lanes {
        __mmask16 used, is_old, is_elsewhere;
        __m512 weights, odds;  // the odds as if no entry were in front
    };

    STAND_WIDE static Lanes read_lanes(const Block* block, int32_t first, const Clock& clock, const float* entry_odds) {
        Lanes lanes;
        lanes.used = static_cast<__mmask16>(_bzhi_u32(0xFFFFu, block->size - first));
        const __m256i weights = _mm256_maskz_loadu_epi16(lanes.used, weights_of(block) + first);
        const __m256i stamps = _mm256_maskz_loadu_epi16(lanes.used, stamps_of(block) + first);
        const __m128i scopes = _mm_maskz_loadu_epi8(lanes.used, scopes_of(block) + first);
        const __m256i ages = _mm256_sub_epi16(_mm256_set1_epi16(static_cast<int16_t>(clock.stamp())), stamps);
        lanes.is_old = _mm256_mask_cmpge_epu16_mask(lanes.used, ages, _mm256_set1_epi16(RECENT));
        lanes.is_elsewhere =
            _mm_mask_cmpneq_epi8_mask(lanes.used, scopes, _mm_set1_epi8(static_cast<char>(clock.scope)));
        lanes.weights = _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(weights));
        const __m512i half_octaves = _mm512_srli_epi32(_mm512_castps_si512(lanes.weights), 22);
        const __m512i above = _mm512_sub_epi32(half_octaves, _mm512_set1_epi32(FIRST_HALF_OCTAVE));
        const __m512i buckets = _mm512_max_epi32(above, _mm512_setzero_si512());
        const __m512 recent = _mm512_loadu_ps(entry_odds), old = _mm512_loadu_ps(entry_odds + NUM_WEIGHTS);
        const __m512 elsewhere = _mm512_loadu_ps(entry_odds + 2 * NUM_WEIGHTS);
        lanes.odds = _mm512_maskz_permutexvar_ps(lanes.used, buckets, recent);
        lanes.odds = _mm512_mask_permutexvar_ps(lanes.odds, lanes.is_old, buckets, old);
        lanes.odds = _mm512_mask_permutexvar_ps(lanes.odds, lanes.is_elsewhere, buckets, elsewhere);
        return lanes;
    }

    STAND_WIDE void add_lanes(const Lanes& lanes, __m512 scale, __m512 cut, const uint32_t* entries) {
        const __m512 values = _mm512_mul_ps(lanes.odds, scale);
        const __mmask16 kept = _mm512_mask_cmp_ps_mask(lanes.used, values, cut, _CMP_GE_OQ);
        const __m512i ids = _mm512_maskz_loadu_epi32(lanes.used, entries);
        _mm512_storeu_ps(probabilities + size, _mm512_maskz_compress_ps(kept, values));
        _mm512_storeu_si512(tokens + size, _mm512_maskz_compress_epi32(kept, ids));
        size += static_cast<int32_t>(_mm_popcnt_u32(kept));
    }

    STAND_WIDE float collect_wide(const Block* block, const Clock& clock, const Odds& odds, float carry, float cut) {
        static_assert(NUM_WEIGHTS == LANES && WIDEST == 2 * LANES, "a register per age, two for the widest context");
        const float* entry_odds = odds.entry + entry_bucket(order_of(block), 0, 0, 0);
        const bool is_wider = block->size > LANES;
        Lanes low = read_lanes(block, 0, clock, entry_odds), high;
        __m512 weights = low.weights, heaviest = low.weights;
        if (is_wider) {
            high = read_lanes(block, LANES, clock, entry_odds);
            weights = _mm512_add_ps(weights, high.weights);
            heaviest = _mm512_max_ps(heaviest, high.weights);
        }
        const uint32_t heaviest_weight = static_cast<uint32_t>(_mm512_reduce_max_ps(heaviest));
        const uint32_t total_weight = static_cast<uint32_t>(_mm512_reduce_add_ps(weights));
        const int32_t latest_age = low.is_elsewhere & 1 ? 2 : low.is_old & 1;
        const uint16_t latest_weight = weights_of(block)[0];
        const int32_t rank = 1 + (latest_weight >= heaviest_weight);
        const float latest = entry_odds[entry_bucket(0, weight_bucket(latest_weight), latest_age, rank)];
        low.odds = _mm512_mask_mov_ps(low.odds, 1, _mm512_set1_ps(latest));
        const float total = _mm512_reduce_add_ps(is_wider ? _mm512_add_ps(low.odds, high.odds) : low.odds);
        const float escape = odds.escape[escape_bucket(block, share_bucket(heaviest_weight, total_weight), latest_age)];
        const float scale = carry / (total + escape);
        const __m512 scales = _mm512_set1_ps(scale), cuts = _mm512_set1_ps(cut);
        add_lanes(low, scales, cuts, tokens_of(block));
        if (is_wider) add_lanes(high, scales, cuts, tokens_of(block) + LANES);
        return scale * escape;
    }
#endif
};

}  // namespace stand
