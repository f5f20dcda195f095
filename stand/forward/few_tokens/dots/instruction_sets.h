// The loops of this folder, once for every instruction set.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../../../simd/exponential.h"
#include "../../../simd/vectors.h"
#include "matrix_unit.h"
#include "operands.h"
#include "order.h"
#include "packed_tokens.h"

namespace stand {

namespace dots {

#define STAND_UNROLL _Pragma("GCC unroll 16")

constexpr int32_t TERMS = 16;  // sums that a product is made of

// Wishes for what lies `offset` numbers after `values`, in the second cache. Nothing is read: it may lie beyond the
// end.
template <class Number>
STAND_INLINE void fetch(const Number* values, int64_t offset) {
    __builtin_prefetch(values + offset, 0, 2);
}

#if defined(__x86_64__)
namespace avx512 {
#include "lanes/avx512.h"
#include "tile.h"
#include "band.h"
#include "attend_tile.h"
#undef STAND_TARGET
}  // namespace avx512

namespace avx512_pairs {
#include "lanes/avx512_pairs.h"
#include "tile.h"
#include "band.h"
#undef STAND_TARGET
}  // namespace avx512_pairs

namespace avx2 {
#include "lanes/avx2.h"
#include "tile.h"
#include "band.h"
#include "attend_tile.h"
#undef STAND_TARGET
}  // namespace avx2
#endif

namespace portable {
#include "lanes/portable.h"
#include "tile.h"
#include "band.h"
#include "attend_tile.h"
#undef STAND_TARGET
}  // namespace portable

// Whether there are products of tokens in Bfloat16.
inline bool has_pairs() {
#if defined(__x86_64__)
    return widest_vectors() == Vectors::avx512 && __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

// For which tiles tokens are packed.
template <class Token>
TileShape tile_shape(Vectors vectors) {
    if constexpr (std::is_same_v<Token, Pair>) return matrix_unit::SHAPE;
#if defined(__x86_64__)
    if constexpr (std::is_same_v<Token, Bfloat16>) return avx512_pairs::SHAPE;
    if (vectors == Vectors::avx512) return avx512::SHAPE;
    if (vectors == Vectors::avx2) return avx2::SHAPE;
#endif
    return portable::SHAPE;
}

// Only where `has_pairs`.
inline void multiply_rows(const Product<Bfloat16, Bfloat16>& product, Vectors, int64_t first, int64_t end) {
#if defined(__x86_64__)
    avx512_pairs::multiply_rows(product, first, end);
#endif
}

// Only where `matrix_unit::is_there`.
inline void multiply_rows(const Product<Bfloat16, Pair>& product, Vectors, int64_t first, int64_t end) {
#if defined(STAND_HAS_AMX)
    matrix_unit::multiply_rows(product, first, end);
#endif
}

// Numbers other than floats: only with AVX2 at least. Without it nobody asks, and the loops are not there.
template <class Number>
void multiply_rows(const Product<Number>& product, Vectors vectors, int64_t first, int64_t end) {
#if defined(__x86_64__)
    if (vectors == Vectors::avx512) return avx512::multiply_rows(product, first, end);
    if (vectors == Vectors::avx2) return avx2::multiply_rows(product, first, end);
#endif
    if constexpr (std::is_same_v<Number, float>) portable::multiply_rows(product, first, end);
}

// As `multiply_rows`.
template <class Number>
void attend_tokens(const Attention& step, Vectors vectors, int64_t row, int64_t head, int64_t first, int64_t end,
                   float* scratch) {
#if defined(__x86_64__)
    if (vectors == Vectors::avx512) return avx512::attend_tokens<Number>(step, row, head, first, end, scratch);
    if (vectors == Vectors::avx2) return avx2::attend_tokens<Number>(step, row, head, first, end, scratch);
#endif
    if constexpr (std::is_same_v<Number, float>)
        portable::attend_tokens<Number>(step, row, head, first, end, scratch);
}

}  // namespace dots

}  // namespace stand
