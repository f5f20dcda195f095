// Sixteen lanes in four parts of four, the registers that arm64 and every x86-64 have. On arm64 a term is rounded once,
// as with AVX, and 4 rows by 6 tokens of one part fill 24 of 32 registers. On x86-64 it is rounded twice.

#define STAND_TARGET

#if defined(__aarch64__)
using Lanes = float32x4_t;
constexpr int32_t MOST_TOKENS = 6;

STAND_INLINE Lanes load(const float* values) { return vld1q_f32(values); }

STAND_INLINE void multiply_add(const Lanes& a, const Lanes& b, Lanes& sum) { sum = vfmaq_f32(sum, a, b); }
#else
using Lanes = float __attribute__((vector_size(16)));
constexpr int32_t MOST_TOKENS = 2;

STAND_INLINE Lanes load(const float* values) {
    Lanes lanes;
    std::memcpy(&lanes, values, sizeof lanes);
    return lanes;
}

STAND_INLINE void multiply_add(const Lanes& a, const Lanes& b, Lanes& sum) { sum += a * b; }
#endif

#include "single_terms.h"

STAND_INLINE void store(const Lanes& lanes, float* values) { std::memcpy(values, &lanes, sizeof lanes); }

STAND_INLINE Lanes spread(float value) { return Lanes{value, value, value, value}; }

STAND_INLINE void add_lanes(const Lanes* sums, float* totals) {
    constexpr int32_t PART = MOST_TOKENS * ROWS;
    for (int32_t row = 0; row < ROWS; ++row) {
        const Lanes* own = sums + row;
        const Lanes all = (own[0] + own[2 * PART]) + (own[PART] + own[3 * PART]);
        totals[row] = (all[0] + all[2]) + (all[1] + all[3]);
    }
}
