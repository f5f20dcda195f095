// Every token times every row of the weights, by one thread or by those of the caller's OpenMP.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "../../threads.h"
#include "instruction_sets.h"

namespace stand {

namespace dots {

constexpr int64_t LEAST_WEIGHTS = 1 << 17;  // with fewer, waiting for a second thread costs what it saves
constexpr int64_t LEAST_SHARE = 32;         // rows; a share begins with rows that nobody has fetched
constexpr int64_t LINE = 64;                // bytes
constexpr int64_t SHARES_PER_THREAD = 4;    // so that a thread that comes late leaves its work to the others

// What the threads share: each takes the next share of some product's rows until none is left.
template <class Factors>
struct Work {
    const Factors* products;  // of the same tokens
    int64_t num_products;
    Vectors vectors;
    int64_t share;  // rows; whole tiles
    std::atomic<int64_t> next{0};

    void run() {
        for (;;) {
            int64_t first = next.fetch_add(share, std::memory_order_relaxed);
            const Factors* own = products;
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

// Rows of a share: a matrix unit's tiles are many rows, so rather more of them than a few rows in a tile of zeros.
template <class Token>
int64_t whole_tiles(int64_t rows, const Token*) {
    if constexpr (std::is_same_v<Token, Pair>) return packed_depth(rows, {1, matrix_unit::SIDE});
    else return rows / ROWS * ROWS;
}

// See `multiply`.
template <class Factors>
void multiply_all(const Factors* products, int64_t num_products, Vectors vectors, int32_t num_threads,
                  RunInThreads in_threads) {
    int64_t num_rows = 0;
    for (int64_t i = 0; i < num_products; ++i) num_rows += products[i].num_rows;
    const int64_t share = num_rows / (std::max(num_threads, 1) * SHARES_PER_THREAD);
    Work<Factors> work{products, num_products, vectors, std::max(whole_tiles(share, products->tokens), LEAST_SHARE)};
    if (in_threads == nullptr || num_threads < 2 || num_rows * products->depth < LEAST_WEIGHTS) return work.run();
    run_in_threads(work, num_threads, in_threads);
}

// Tokens packed at an address where a cache line begins.
template <class Token>
struct Packed {
    std::unique_ptr<Token[]> memory;
    Token* tokens;

    template <class Number>
    Packed(const Number* plain, int64_t num_tokens, int64_t depth, TileShape shape)
        : memory(new Token[packed_size<Token>(num_tokens, depth, shape) + LINE / sizeof(Token)]) {
        const auto address = reinterpret_cast<uintptr_t>(memory.get());
        tokens = reinterpret_cast<Token*>((address + LINE - 1) / LINE * LINE);
        pack_tokens(plain, num_tokens, depth, shape, tokens);
    }
};

// Where one product's numbers are.
struct Matrix {
    const void* weights;  // [num_rows, depth]
    const void* bias;     // [num_rows], or null
    void* results;        // [num_tokens, num_rows]
    int64_t num_rows;
};

constexpr int64_t MOST_MATRICES = 4;

// Numbers of all matrices and of the tokens, and the tokens as they are multiplied.
template <class Number, class Token>
void multiply_as(const void* tokens, int64_t num_tokens, int64_t depth, const Matrix* matrices, int64_t num_matrices,
                 Vectors vectors, int32_t num_threads, RunInThreads in_threads) {
    const TileShape shape = tile_shape<Token>(vectors);
    const Packed<Token> packed(static_cast<const Number*>(tokens), num_tokens, depth, shape);
    Product<Number, Token> products[MOST_MATRICES];
    for (int64_t i = 0; i < num_matrices; ++i) {
        const Matrix& one = matrices[i];
        products[i] = {packed.tokens, static_cast<const Number*>(one.weights), static_cast<const Number*>(one.bias),
                       nullptr, nullptr, num_tokens, one.num_rows, depth, one.num_rows};
        if constexpr (std::is_same_v<Number, float>) products[i].results = static_cast<float*>(one.results);
        else products[i].narrow_results = static_cast<Bfloat16*>(one.results);
    }
    multiply_all(products, num_matrices, vectors, num_threads, in_threads);
}

}  // namespace dots

using dots::Matrix;

// What all numbers are, and how they are multiplied: of Bfloat16 one by one as floats, or by the processor in pairs, or
// in tiles by its matrix unit.
enum class Numbers : int32_t { floats, narrow, pairs, tiles };

// tokens [num_tokens, depth] times up to MOST_MATRICES matrices, all by one call of `in_threads`; null for the calling
// thread alone. Throws std::bad_alloc.
inline void multiply(const void* tokens, int64_t num_tokens, int64_t depth, const Matrix* matrices,
                     int64_t num_matrices, Numbers numbers, Vectors vectors, int32_t num_threads,
                     RunInThreads in_threads) {
    if (num_tokens == 0) return;
    const auto as = [&](auto number, auto token) {
        dots::multiply_as<decltype(number), decltype(token)>(tokens, num_tokens, depth, matrices, num_matrices, vectors,
                                                             num_threads, in_threads);
    };
    if (numbers == Numbers::floats) return as(float{}, float{});
    if (numbers == Numbers::narrow) return as(Bfloat16{}, float{});
    if (numbers == Numbers::pairs) return as(Bfloat16{}, Bfloat16{});
    as(Bfloat16{}, dots::Pair{});
}

}  // namespace stand
