// Two terms per lane and load: processors with AVX512_BF16 add the products of both to a float, numbers too small for a
// float's usual form taken as 0.

#define STAND_TARGET [[gnu::target("avx512f,avx512bf16")]]

#include "avx512_lanes.h"

using Token = Bfloat16;
using Loaded = __m512bh;
constexpr int32_t STEP = 2 * TERMS;

STAND_TARGET STAND_INLINE Loaded load(const Bfloat16* values) {
    Loaded pairs;
    std::memcpy(&pairs, values, sizeof pairs);
    return pairs;
}

STAND_TARGET STAND_INLINE void multiply_add(Loaded a, Loaded b, Lanes& sum) { sum = _mm512_dpbf16_ps(sum, a, b); }

STAND_INLINE Token as_token(Bfloat16 value) { return value; }
