// Products by the matrix unit of a processor with AMX: one instruction multiplies 16 rows of the weights, as they lie,
// with 16 tokens, 32 terms at a time. So up to 64 tokens take little more time than one, which has to wait for memory.
// A product is one sum in float32: of 32 terms those with even places are added up in order, and those with odd ones;
// then their sum is added to the terms before. Numbers too small for a float's usual form are taken as 0.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../../../simd/vectors.h"
#include "operands.h"
#include "packed_tokens.h"

#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define STAND_HAS_AMX
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace stand {

namespace dots {

// Two terms of a token, which the unit multiplies at a time.
struct Pair {
    Bfloat16 terms[2];
};

namespace matrix_unit {

constexpr int64_t SIDE = 16;            // rows, tokens and pairs of an instruction
constexpr TileShape SHAPE{SIDE, 2 * SIDE};
constexpr int64_t AHEAD = 128;          // terms, which are asked of memory meanwhile
constexpr int64_t MOST_GROUPS = 4;      // of SIDE tokens, which are multiplied while a tile of weights is there

inline int64_t num_groups(int64_t num_tokens) { return (num_tokens + SIDE - 1) / SIDE; }

// Whether the processor has a unit, and the system lets this process use it.
inline bool is_there() {
#if defined(STAND_HAS_AMX)
    constexpr unsigned BFLOAT16 = 1 << 22, TILES = 1 << 24;  // of CPUID's leaf 7, EDX
    constexpr long ASK_FOR = 0x1023, TILE_DATA = 18;         // of Linux's arch_prctl
    unsigned a, b, c, d;
    if (widest_vectors() != Vectors::avx512 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d & BFLOAT16) != 0 && (d & TILES) != 0 && syscall(SYS_arch_prctl, ASK_FOR, TILE_DATA) == 0;
#else
    return false;
#endif
}

#if defined(STAND_HAS_AMX)

#define STAND_AMX [[gnu::target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl")]]

// Tiles by number: sums of the groups are 0 to 3, then come weights and tokens.
STAND_AMX inline void set_up() {
    struct alignas(64) {
        uint8_t palette = 1, rest[15] = {};
        uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64};
        uint8_t num_rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
    } shapes;
    _tile_loadconfig(&shapes);
}

// A step's terms of `there` rows, with zeros for more where rows or terms end.
[[gnu::noinline]] inline void fill(const Bfloat16* weights, int64_t depth, int64_t there, int64_t terms,
                                   Bfloat16* filled) {
    std::fill_n(filled, SIDE * SHAPE.step, Bfloat16{});
    for (int64_t r = 0; r < there; ++r) std::copy_n(weights + r * depth, terms, filled + r * SHAPE.step);
}

// sums [GROUPS, SIDE rows, SIDE tokens] of the rows from `row` on.
template <int64_t GROUPS>
STAND_AMX void add_terms(const Product<Bfloat16, Pair>& product, int64_t row, const Pair* tokens, float* sums) {
    constexpr int64_t STEP = SHAPE.step;
    const int64_t depth = product.depth, group = packed_depth(depth, SHAPE) * SIDE / 2;
    const int64_t there = std::min(SIDE, product.num_rows - row);
    const Bfloat16* const weights = product.weights + row * depth;
    Bfloat16 filled[SIDE * STEP];
    _tile_zero(0);
    if constexpr (GROUPS > 1) _tile_zero(1);
    if constexpr (GROUPS > 2) _tile_zero(2);
    if constexpr (GROUPS > 3) _tile_zero(3);
    for (int64_t k = 0; k < depth; k += STEP, tokens += SIDE * SIDE) {
        if (there == SIDE && k + STEP <= depth) {
            _tile_loadd(4, weights + k, depth * sizeof(Bfloat16));
            for (int64_t r = 0; r < SIDE; ++r) __builtin_prefetch(weights + k + r * depth + AHEAD, 0, 3);
        } else {
            fill(weights + k, depth, there, std::min(STEP, depth - k), filled);
            _tile_loadd(4, filled, STEP * sizeof(Bfloat16));
        }
        _tile_loadd(5, tokens, SIDE * sizeof(Pair));
        _tile_dpbf16ps(0, 4, 5);
        if constexpr (GROUPS > 1) {
            _tile_loadd(6, tokens + group, SIDE * sizeof(Pair));
            _tile_dpbf16ps(1, 4, 6);
        }
        if constexpr (GROUPS > 2) {
            _tile_loadd(5, tokens + 2 * group, SIDE * sizeof(Pair));
            _tile_dpbf16ps(2, 4, 5);
        }
        if constexpr (GROUPS > 3) {
            _tile_loadd(6, tokens + 3 * group, SIDE * sizeof(Pair));
            _tile_dpbf16ps(3, 4, 6);
        }
    }
    _tile_stored(0, sums, SIDE * sizeof(float));
    if constexpr (GROUPS > 1) _tile_stored(1, sums + SIDE * SIDE, SIDE * sizeof(float));
    if constexpr (GROUPS > 2) _tile_stored(2, sums + 2 * SIDE * SIDE, SIDE * sizeof(float));
    if constexpr (GROUPS > 3) _tile_stored(3, sums + 3 * SIDE * SIDE, SIDE * sizeof(float));
}

// add_terms<groups>, where 1 <= groups <= GROUPS.
template <int64_t GROUPS>
STAND_AMX void add_groups(int64_t groups, const Product<Bfloat16, Pair>& product, int64_t row, const Pair* tokens,
                          float* sums) {
    if constexpr (GROUPS > 1)
        if (groups < GROUPS) return add_groups<GROUPS - 1>(groups, product, row, tokens, sums);
    add_terms<GROUPS>(product, row, tokens, sums);
}

// As `narrow` rounds: the upper halves of 16 floats.
STAND_AMX inline __m256i narrowed(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(_mm512_srli_epi32(rounded, 16), is_nan, 0x7FC0));
}

// sums [groups, SIDE rows, SIDE tokens] and the bias -> the results of `count` tokens from `token` on.
STAND_AMX inline void write_sums(const Product<Bfloat16, Pair>& product, int64_t row, int64_t token, int64_t count,
                                 const float* sums) {
    const int64_t there = std::min(SIDE, product.num_rows - row);
    const __mmask16 rows = static_cast<__mmask16>((1 << there) - 1);
    const __m512i steps = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i places = _mm512_slli_epi32(steps, 4);  // of a token's rows
    __m512 bias = _mm512_setzero_ps();
    if (product.bias != nullptr) {
        const __m256i halves = _mm256_maskz_loadu_epi16(rows, product.bias + row);
        bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    for (int64_t t = 0; t < count; ++t) {
        const __m512 totals = _mm512_i32gather_ps(places, sums + t / SIDE * SIDE * SIDE + t % SIDE, sizeof(float));
        Bfloat16* const results = product.narrow_results + (token + t) * product.stride + row;
        _mm256_mask_storeu_epi16(results, rows, narrowed(_mm512_add_ps(totals, bias)));
    }
}

// Rows [first, end), all tokens.
STAND_AMX inline void multiply_rows(const Product<Bfloat16, Pair>& product, int64_t first, int64_t end) {
    alignas(64) float sums[MOST_GROUPS * SIDE * SIDE];
    set_up();
    for (int64_t row = first; row < end; row += SIDE)
        for (int64_t token = 0; token < product.num_tokens; token += MOST_GROUPS * SIDE) {
            const int64_t count = std::min(MOST_GROUPS * SIDE, product.num_tokens - token);
            const Pair* tokens = product.tokens + token * packed_depth(product.depth, SHAPE) / 2;
            add_groups<MOST_GROUPS>(num_groups(count), product, row, tokens, sums);
            write_sums(product, row, token, count, sums);
        }
    _tile_release();
}

#undef STAND_AMX

#endif

}  // namespace matrix_unit

template <>
inline int64_t packed_size<Pair>(int64_t num_tokens, int64_t depth, TileShape shape) {
    return matrix_unit::num_groups(num_tokens) * matrix_unit::SIDE * packed_depth(depth, shape) / 2;
}

// tokens [num_tokens, depth] -> packed [groups of SIDE tokens, steps, SIDE pairs, SIDE tokens], filled up with zeros.
inline void pack_tokens(const Bfloat16* tokens, int64_t num_tokens, int64_t depth, TileShape shape, Pair* packed) {
    using matrix_unit::SIDE;
    const int64_t pairs = packed_depth(depth, shape) / 2;
    std::fill_n(packed, packed_size<Pair>(num_tokens, depth, shape), Pair{});
    for (int64_t t = 0; t < num_tokens; ++t) {
        const Bfloat16* const own = tokens + t * depth;
        Pair* const place = packed + t / SIDE * SIDE * pairs + t % SIDE;
        for (int64_t k = 0; k + 1 < depth; k += 2) std::memcpy(place + k / 2 * SIDE, own + k, sizeof(Pair));
        if (depth % 2 == 1) place[depth / 2 * SIDE].terms[0] = own[depth - 1];
    }
}

}  // namespace dots

}  // namespace stand
