// Every token times every row of the weights, by one thread or by those of the caller's OpenMP.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../../vectors.h"

namespace stand {

struct Product {
    const float* tokens;   // [num_tokens, depth]
    const float* weights;  // [num_rows, depth]
    const float* bias;     // [num_rows], or null
    float* results;        // [num_tokens, num_rows]
    int64_t num_tokens, num_rows, depth;
};

namespace dots {

#define STAND_UNROLL _Pragma("GCC unroll 16")

constexpr int32_t TERMS = 16;  // sums that a product is made of
constexpr int32_t ROWS = 4;    // of a tile

// Wishes for what lies `offset` numbers after `values`, in the second cache. Nothing is read: it may lie beyond the end.
STAND_INLINE void fetch(const float* values, int64_t offset) { __builtin_prefetch(values + offset, 0, 2); }

#if defined(__x86_64__)
namespace avx512 {
#include "avx512.h"
#include "tile.h"
#undef STAND_TARGET
}  // namespace avx512

namespace avx2 {
#include "avx2.h"
#include "tile.h"
#undef STAND_TARGET
}  // namespace avx2
#endif

namespace portable {
#include "portable.h"
#include "tile.h"
#undef STAND_TARGET
}  // namespace portable

inline void multiply_rows(const Product& product, Vectors vectors, int64_t first, int64_t end) {
#if defined(__x86_64__)
    if (vectors == Vectors::avx512) return avx512::multiply_rows(product, first, end);
    if (vectors == Vectors::avx2) return avx2::multiply_rows(product, first, end);
#endif
    portable::multiply_rows(product, first, end);
}

constexpr int64_t LEAST_WEIGHTS = 1 << 17;  // with fewer, waiting for a second thread costs what it saves
constexpr int64_t LEAST_SHARE = 32;         // rows; a share begins with rows that nobody has fetched
constexpr int64_t SHARES_PER_THREAD = 4;    // so that a thread that comes late leaves its work to the others

// What the threads share: each takes the next share of the rows until none is left.
struct Work {
    const Product& product;
    Vectors vectors;
    int64_t share;  // rows; a multiple of ROWS
    std::atomic<int64_t> next{0};

    void run() {
        for (;;) {
            const int64_t first = next.fetch_add(share, std::memory_order_relaxed);
            if (first >= product.num_rows) return;
            multiply_rows(product, vectors, first, std::min(first + share, product.num_rows));
        }
    }
};

}  // namespace dots

// GOMP_parallel of GNU's OpenMP: calls a function in so many threads, the caller's among them, and waits for all.
using RunInThreads = void (*)(void (*)(void*), void*, unsigned, unsigned);

// `in_threads`: null for the calling thread alone.
inline void multiply(const Product& product, Vectors vectors, int32_t num_threads, RunInThreads in_threads) {
    using namespace dots;
    if (in_threads == nullptr || num_threads < 2 || product.num_rows * product.depth < LEAST_WEIGHTS)
        return multiply_rows(product, vectors, 0, product.num_rows);
    const int64_t share = product.num_rows / (num_threads * SHARES_PER_THREAD) / ROWS * ROWS;
    Work work{product, vectors, std::max(share, LEAST_SHARE)};
    in_threads([](void* given) { static_cast<Work*>(given)->run(); }, &work, num_threads, 0);
}

}  // namespace stand
