// Attention of a step's few tokens over their rows of a cache, by one thread or by those of the caller's OpenMP.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "../../../simd/threads.h"
#include "instruction_sets.h"

namespace stand {

namespace dots {

constexpr int64_t MOST_QUERIES = 24;       // of a piece of work that reads a head's keys once
constexpr int64_t LEAST_TERMS = 1 << 20;   // of scores and sums; with fewer, a second thread costs what it saves

// What the threads share: each takes the next key head of a row until none is left.
template <class Number>
struct Heads {
    const Attention& step;
    Vectors vectors;
    int64_t tokens;     // of a piece
    int64_t room;       // numbers of scratch per thread
    float* scratch;
    std::atomic<int64_t> next{0}, num_begun{0};

    void run() {
        float* const own = scratch + num_begun.fetch_add(1, std::memory_order_relaxed) * room;
        for (;;) {
            const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
            if (item >= step.num_rows * step.num_key_heads) return;
            const int64_t row = item / step.num_key_heads, end = step.offsets[row + 1];
            for (int64_t token = step.offsets[row]; token < end; token += tokens)
                attend_tokens<Number>(step, vectors, row, item % step.num_key_heads, token,
                                      std::min(token + tokens, end), own);
        }
    }
};

// Numbers that a piece of `tokens` tokens of any row writes on the way.
inline int64_t scratch_room(const Attention& step, int64_t tokens) {
    int64_t longest = 0, tail = 0;
    for (int64_t row = 0; row < step.num_rows; ++row) {
        longest = std::max(longest, step.lengths[row] + step.tails[row]);
        tail = std::max(tail, step.tails[row]);
    }
    return tokens * step.groups * (2 * step.size + longest + tail + 2 * TERMS + 1);
}

inline int64_t num_terms(const Attention& step) {
    int64_t terms = 0;
    for (int64_t row = 0; row < step.num_rows; ++row)
        terms += (step.offsets[row + 1] - step.offsets[row]) * (step.lengths[row] + step.tails[row]);
    return 2 * terms * step.num_key_heads * step.groups * step.size;
}

// See `attend`.
template <class Number>
void attend_as(const Attention& step, Vectors vectors, int32_t num_threads, RunInThreads in_threads) {
    const int64_t tokens = std::max<int64_t>(MOST_QUERIES / step.groups, 1), room = scratch_room(step, tokens);
    const bool is_alone = in_threads == nullptr || num_threads < 2 || num_terms(step) < LEAST_TERMS;
    std::unique_ptr<float[]> scratch(new float[room * (is_alone ? 1 : num_threads)]);
    Heads<Number> heads{step, vectors, tokens, room, scratch.get()};
    if (is_alone) return heads.run();
    run_in_threads(heads, num_threads, in_threads);
}

}  // namespace dots

// is_narrow: numbers are Bfloat16. `in_threads`: null for the calling thread alone. Throws std::bad_alloc.
inline void attend(const Attention& step, bool is_narrow, Vectors vectors, int32_t num_threads,
                   RunInThreads in_threads) {
    if (is_narrow) return dots::attend_as<Bfloat16>(step, vectors, num_threads, in_threads);
    dots::attend_as<float>(step, vectors, num_threads, in_threads);
}

}  // namespace stand
