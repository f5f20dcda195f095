// Every token times every row of the weights, by one thread or by those of the caller's OpenMP.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

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
    const std::vector<Factors>& products;
    Vectors vectors;
    int64_t share;  // rows; whole tiles
    std::atomic<int64_t> next{0};

    void run() {
        for (;;) {
            int64_t first = next.fetch_add(share, std::memory_order_relaxed);
            auto own = products.begin();
            for (; own != products.end(); ++own) {
                const int64_t whole = (own->num_rows + share - 1) / share * share;
                if (first < whole) break;
                first -= whole;
            }
            if (own == products.end()) return;
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
void multiply_all(const std::vector<Factors>& products, Vectors vectors, int32_t num_threads,
                  RunInThreads in_threads) {
    if (products.empty()) return;
    int64_t num_rows = 0;
    for (const Factors& product : products) num_rows += product.num_rows;
    const int64_t share = num_rows / (std::max(num_threads, 1) * SHARES_PER_THREAD);
    const Factors& any = products.front();
    Work<Factors> work{products, vectors, std::max(whole_tiles(share, any.tokens), LEAST_SHARE)};
    if (in_threads == nullptr || num_threads < 2 || num_rows * any.depth < LEAST_WEIGHTS) return work.run();
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
    const void* tokens;   // [num_tokens, depth]
    const void* weights;  // [num_rows, depth]
    const void* bias;     // [num_rows], or null
    void* results;        // [num_tokens, num_rows]
    int64_t num_tokens, num_rows;
};

// Numbers of all matrices and of their tokens, and the tokens as they are multiplied. Matrices that follow each other
// may have the same tokens.
template <class Number, class Token>
void multiply_as(const std::vector<Matrix>& matrices, int64_t depth, Vectors vectors, int32_t num_threads,
                 RunInThreads in_threads) {
    const TileShape shape = tile_shape<Token>(vectors);
    std::vector<Packed<Token>> packed;
    std::vector<Product<Number, Token>> products;
    packed.reserve(matrices.size());
    products.reserve(matrices.size());
    const void* tokens = nullptr;
    for (const Matrix& one : matrices) {
        if (one.num_tokens == 0) continue;
        if (one.tokens != tokens) {
            tokens = one.tokens;
            packed.emplace_back(static_cast<const Number*>(tokens), one.num_tokens, depth, shape);
        }
        products.push_back({packed.back().tokens, static_cast<const Number*>(one.weights),
                            static_cast<const Number*>(one.bias), nullptr, nullptr, one.num_tokens, one.num_rows, depth,
                            one.num_rows});
        if constexpr (std::is_same_v<Number, float>) products.back().results = static_cast<float*>(one.results);
        else products.back().narrow_results = static_cast<Bfloat16*>(one.results);
    }
    multiply_all(products, vectors, num_threads, in_threads);
}

}  // namespace dots

using dots::Matrix;

// What all numbers are, and how they are multiplied: of Bfloat16 one by one as floats, or by the processor in pairs, or
// in tiles by its matrix unit.
enum class Numbers : int32_t { floats, narrow, pairs, tiles };

// The tokens of each matrix times its weights, all by one call of `in_threads`; null for the calling thread alone.
// Throws std::bad_alloc.
inline void multiply(const std::vector<Matrix>& matrices, int64_t depth, Numbers numbers, Vectors vectors,
                     int32_t num_threads, RunInThreads in_threads) {
    const auto as = [&](auto number, auto token) {
        dots::multiply_as<decltype(number), decltype(token)>(matrices, depth, vectors, num_threads, in_threads);
    };
    if (numbers == Numbers::floats) return as(float{}, float{});
    if (numbers == Numbers::narrow) return as(Bfloat16{}, float{});
    if (numbers == Numbers::pairs) return as(Bfloat16{}, Bfloat16{});
    as(Bfloat16{}, dots::Pair{});
}

}  // namespace stand
