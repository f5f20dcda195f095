// Sixteen lanes in two parts of eight: 4 rows by 3 tokens of one part fill 12 of the 16 registers of AVX2.

#define STAND_TARGET [[gnu::target("avx2,fma")]]

using Lanes = __m256;
constexpr int32_t MOST_TOKENS = 3;

#include "single_terms.h"

STAND_TARGET STAND_INLINE Lanes load(const float* values) { return _mm256_loadu_ps(values); }

STAND_TARGET STAND_INLINE Lanes load(const Bfloat16* values) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

STAND_TARGET STAND_INLINE void store(Lanes lanes, float* values) { _mm256_storeu_ps(values, lanes); }

STAND_TARGET STAND_INLINE Lanes spread(float value) { return _mm256_set1_ps(value); }

STAND_TARGET STAND_INLINE void multiply_add(Lanes a, Lanes b, Lanes& sum) { sum = _mm256_fmadd_ps(a, b, sum); }

STAND_TARGET STAND_INLINE void add_lanes(const Lanes* sums, float* totals) {
    for (int32_t row = 0; row < ROWS; ++row) {
        const Lanes half = _mm256_add_ps(sums[row], sums[row + MOST_TOKENS * ROWS]);
        __m128 all = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
        all = _mm_add_ps(all, _mm_permute_ps(all, 0x4E));
        totals[row] = _mm_cvtss_f32(_mm_add_ss(all, _mm_permute_ps(all, 0xB1)));
    }
}
