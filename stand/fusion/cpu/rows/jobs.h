// What the layers of a model do between their products, row by row: norms, gates, rotary positions with the cache
// write.
//
// A row is one token's numbers, floats or Bfloat16. Its sums have one order, whatever rows are beside it, by any thread
// and with any instruction set: all of them have sixteen lanes, and none fuses a product with its sum. Arithmetic is in
// floats; of Bfloat16 each result is rounded that a module of transformers rounds.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../../../simd/bfloat16.h"
#include "../../../simd/threads.h"
#include "../../../simd/vectors.h"

namespace stand {

// How a normal number n and its weight w become a result: as in stand/fusion/formulas.py.
enum class Rule : int32_t { round_first, scale_first, one_plus };

// states [rows, size], or states + change, which go to `total`; normed and scaled by weight.
struct Norm {
    const void* states;
    const void* change;  // or null
    const void* weight;  // [size]
    void* total;         // [rows, size], where there is a change
    void* output;        // [rows, size]
    int64_t states_stride, change_stride, size;
    double epsilon;
    Rule rule;
};

enum class Activation : int32_t { silu, gelu_tanh, gelu_erf };

// activation(gate) * up
struct Gate {
    const void* gate;  // [rows, size]
    const void* up;
    void* output;
    int64_t gate_stride, up_stride, size;
    Activation activation;
};

constexpr int64_t LARGEST_HEAD = 1024;

// Every token's heads, normed where there are weights and turned; keys and values go to the token's slot.
struct Heads {
    const void *query, *key, *value;  // [rows, heads, size], [rows, key_heads, size]
    const void *cosines, *sines;      // [rows, half], the factors of second halves `second` numbers after the first's
    const void *query_weight, *key_weight;  // [size], or null
    const int64_t* slots;                   // [rows]: room * (row of the cache) + slot; below 0: is not written
    void* output;                           // [rows, heads, size]
    void *keys, *values;
    int64_t query_stride, key_stride, value_stride, cosine_stride, sine_stride, second;
    int64_t heads, key_heads, size, half;
    int64_t row_stride, head_stride, slot_stride, room;
    double epsilon;
    Rule rule;
};

namespace rows {

constexpr int64_t TERMS = 16;  // sums that a sum of squares is made of

#if defined(__x86_64__)
namespace avx512 {
#define STAND_TARGET [[gnu::target("avx512f")]]
constexpr int64_t WIDTH = 16;
#include "row.h"
#undef STAND_TARGET
}  // namespace avx512

namespace avx2 {
#define STAND_TARGET [[gnu::target("avx2")]]
constexpr int64_t WIDTH = 8;
#include "row.h"
#undef STAND_TARGET
}  // namespace avx2
#endif

namespace portable {
#define STAND_TARGET
constexpr int64_t WIDTH = 4;
#include "row.h"
#undef STAND_TARGET
}  // namespace portable

// Bfloat16 only with AVX2 at least: without it nobody asks, and the loops are not there.
template <class Number, class Job>
void do_rows(const Job& job, Vectors vectors, int64_t first, int64_t end) {
#if defined(__x86_64__)
    if (vectors == Vectors::avx512) return avx512::do_rows<Number>(job, first, end);
    if (vectors == Vectors::avx2) return avx2::do_rows<Number>(job, first, end);
#endif
    if constexpr (std::is_same_v<Number, float>) portable::do_rows<Number>(job, first, end);
}

constexpr int64_t LEAST_SHARE = 1 << 16;  // numbers; with fewer, waiting for a second thread costs what it saves

// What the threads share: each takes the next share of the rows until none is left.
template <class Number, class Job>
struct Work {
    const Job& job;
    Vectors vectors;
    int64_t num_rows, share;  // rows
    std::atomic<int64_t> next{0};

    void run() {
        for (;;) {
            const int64_t first = next.fetch_add(share, std::memory_order_relaxed);
            if (first >= num_rows) return;
            do_rows<Number>(job, vectors, first, std::min(first + share, num_rows));
        }
    }
};

// See `run`.
template <class Number, class Job>
void run_as(const Job& job, int64_t num_rows, int64_t row_size, Vectors vectors, int32_t num_threads,
            RunInThreads in_threads) {
    const int64_t share = std::max<int64_t>(LEAST_SHARE / std::max<int64_t>(row_size, 1), 1);
    if (in_threads == nullptr || num_threads < 2 || num_rows <= share)
        return do_rows<Number>(job, vectors, 0, num_rows);
    Work<Number, Job> work{job, vectors, num_rows, share};
    run_in_threads(work, num_threads, in_threads);
}

}  // namespace rows

// is_narrow: numbers are Bfloat16. `in_threads`: null for the calling thread alone.
template <class Job>
void run(const Job& job, int64_t num_rows, int64_t row_size, bool is_narrow, Vectors vectors, int32_t num_threads,
         RunInThreads in_threads) {
    if (is_narrow) return rows::run_as<Bfloat16>(job, num_rows, row_size, vectors, num_threads, in_threads);
    rows::run_as<float>(job, num_rows, row_size, vectors, num_threads, in_threads);
}

// Whether every token's slot is in a cache of `num_slots`.
inline bool are_inside(const int64_t* slots, int64_t num_tokens, int64_t num_slots) {
    return std::all_of(slots, slots + num_tokens, [&](int64_t slot) { return slot < num_slots; });
}

}  // namespace stand
