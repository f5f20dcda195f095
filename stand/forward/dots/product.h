// Every token times every row of the weights, by one thread or by those of the caller's OpenMP.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "instruction_sets.h"

namespace stand {

namespace dots {

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
