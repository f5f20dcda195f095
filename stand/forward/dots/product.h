// Every token times every row of the weights, by one thread or by those of the caller's OpenMP.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "../../threads.h"
#include "instruction_sets.h"

namespace stand {

namespace dots {

constexpr int64_t LEAST_WEIGHTS = 1 << 17;  // with fewer, waiting for a second thread costs what it saves
constexpr int64_t LEAST_SHARE = 32;         // rows; a share begins with rows that nobody has fetched
constexpr int64_t SHARES_PER_THREAD = 4;    // so that a thread that comes late leaves its work to the others

// What the threads share: each takes the next share of some product's rows until none is left.
struct Work {
    const Product* products;  // of the same tokens
    int64_t num_products;
    Vectors vectors;
    int64_t share;  // rows; a multiple of ROWS
    std::atomic<int64_t> next{0};

    void run() {
        for (;;) {
            int64_t first = next.fetch_add(share, std::memory_order_relaxed);
            const Product* own = products;
            for (; own != products + num_products; ++own) {
                const int64_t whole = (own->num_rows + share - 1) / share * share;
                if (first < whole) break;
                first -= whole;
            }
            if (own == products + num_products) return;
            multiply_rows(*own, vectors, first, std::min(first + share, own->num_rows));
        }
    }
};

}  // namespace dots

// Products of the same tokens, all by one call of `in_threads`; null for the calling thread alone.
inline void multiply(const Product* products, int64_t num_products, Vectors vectors, int32_t num_threads,
                     RunInThreads in_threads) {
    using namespace dots;
    int64_t num_rows = 0;
    for (int64_t i = 0; i < num_products; ++i) num_rows += products[i].num_rows;
    const int64_t share = num_rows / (std::max(num_threads, 1) * SHARES_PER_THREAD) / ROWS * ROWS;
    Work work{products, num_products, vectors, std::max(share, LEAST_SHARE)};
    if (in_threads == nullptr || num_threads < 2 || num_rows * products->depth < LEAST_WEIGHTS) return work.run();
    run_in_threads(work, num_threads, in_threads);
}

}  // namespace stand
