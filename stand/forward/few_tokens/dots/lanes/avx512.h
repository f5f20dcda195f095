// One term per lane and load.

#define STAND_TARGET [[gnu::target("avx512f")]]

#include "avx512_lanes.h"
#include "single_terms.h"

STAND_TARGET STAND_INLINE Lanes load(const float* values) { return _mm512_loadu_ps(values); }

STAND_TARGET STAND_INLINE Lanes load(const Bfloat16* values) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

STAND_TARGET STAND_INLINE void store(Lanes lanes, float* values) { _mm512_storeu_ps(values, lanes); }

STAND_TARGET STAND_INLINE Lanes spread(float value) { return _mm512_set1_ps(value); }

STAND_TARGET STAND_INLINE void multiply_add(Lanes a, Lanes b, Lanes& sum) { sum = _mm512_fmadd_ps(a, b, sum); }
