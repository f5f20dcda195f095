// Every token times every row of the weights, by one thread or by those of the caller's OpenMP.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "../../../simd/threads.h"
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
    const Factors* products;
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

// Where one product's numbers are.
struct Matrix {
    const void* tokens;   // [num_tokens, depth], at least one
    const void* weights;  // [num_rows, depth]
    const void* bias;     // [num_rows], or null
    void* results;        // [num_tokens, num_rows]
    int64_t num_tokens, num_rows;
};

// Packed tokens of all matrices, from an address on where a cache line begins. Those that follow each other may have
// the same tokens.
template <class Number, class Token>
class Packed {
  public:
    Packed(const Matrix* matrices, int64_t num_matrices, int64_t depth, TileShape shape)
        : depth_(depth), shape_(shape), memory_(new Token[room(matrices, num_matrices)]) {
        const auto address = reinterpret_cast<uintptr_t>(memory_.get());
        next_ = reinterpret_cast<Token*>((address + LINE - 1) / LINE * LINE);
    }

    // To be asked of all matrices in their order.
    const Token* of(const Matrix& matrix) {
        if (matrix.tokens != plain_) {
            plain_ = matrix.tokens;
            last_ = next_;
            pack_tokens(static_cast<const Number*>(plain_), matrix.num_tokens, depth_, shape_, last_);
            next_ += size(matrix);
        }
        return last_;
    }

  private:
    // In whole cache lines.
    int64_t size(const Matrix& matrix) const {
        constexpr int64_t line = LINE / sizeof(Token);
        return (packed_size<Token>(matrix.num_tokens, depth_, shape_) + line - 1) / line * line;
    }

    int64_t room(const Matrix* matrices, int64_t num_matrices) const {
        int64_t room = LINE / sizeof(Token);
        const void* before = nullptr;
        for (int64_t i = 0; i < num_matrices; before = matrices[i++].tokens)
            if (matrices[i].tokens != before) room += size(matrices[i]);
        return room;
    }

    int64_t depth_;
    TileShape shape_;
    std::unique_ptr<Token[]> memory_;
    const void* plain_ = nullptr;
    Token *last_ = nullptr, *next_;
};

// Numbers of all matrices and of their tokens, and the tokens as they are multiplied.
template <class Number, class Token>
void multiply_as(const Matrix* matrices, int64_t num_matrices, int64_t depth, Vectors vectors, int32_t num_threads,
                 RunInThreads in_threads) {
    Packed<Number, Token> packed(matrices, num_matrices, depth, tile_shape<Token>(vectors));
    const std::unique_ptr<Product<Number, Token>[]> products(new Product<Number, Token>[num_matrices]);
    for (int64_t i = 0; i < num_matrices; ++i) {
        const Matrix& one = matrices[i];
        products[i] = {packed.of(one), static_cast<const Number*>(one.weights), static_cast<const Number*>(one.bias),
                       nullptr, nullptr, one.num_tokens, one.num_rows, depth, one.num_rows};
        if constexpr (std::is_same_v<Number, float>) products[i].results = static_cast<float*>(one.results);
        else products[i].narrow_results = static_cast<Bfloat16*>(one.results);
    }
    multiply_all(products.get(), num_matrices, vectors, num_threads, in_threads);
}

}  // namespace dots

using dots::Matrix;

// What all numbers are, and how they are multiplied: of Bfloat16 one by one as floats, or by the processor in pairs, or
// in tiles by its matrix unit.
enum class Numbers : int32_t { floats, narrow, pairs, tiles };

// The tokens of each matrix times its weights, all by one call of `in_threads`; null for the calling thread alone.
// Throws std::bad_alloc.
inline void multiply(const Matrix* matrices, int64_t num_matrices, int64_t depth, Numbers numbers, Vectors vectors,
                     int32_t num_threads, RunInThreads in_threads) {
    if (num_matrices == 0 || matrices->num_tokens == 0) return;
    const auto as = [&](auto number, auto token) {
        dots::multiply_as<decltype(number), decltype(token)>(matrices, num_matrices, depth, vectors, num_threads,
                                                             in_threads);
    };
    if (numbers == Numbers::floats) return as(float{}, float{});
    if (numbers == Numbers::narrow) return as(Bfloat16{}, float{});
    if (numbers == Numbers::pairs) return as(Bfloat16{}, Bfloat16{});
    as(Bfloat16{}, dots::Pair{});
}

// Of `whole`, [groups, num_rows, depth] weights and as many biases, each matrix times its own group of tokens, which
// ends before ends[group]; the first one's begin at 0. The rest as in `multiply`.
inline void multiply_groups(const Matrix& whole, const int64_t* ends, int64_t num_groups, int64_t depth,
                            Numbers numbers, Vectors vectors, int32_t num_threads, RunInThreads in_threads) {
    const int64_t size = numbers == Numbers::floats ? sizeof(float) : sizeof(Bfloat16);
    const auto behind = [&](const void* address, int64_t count) {
        return address == nullptr ? nullptr : static_cast<const char*>(address) + count * size;
    };
    const std::unique_ptr<Matrix[]> matrices(new Matrix[num_groups]);
    int64_t count = 0, first = 0;
    for (int64_t group = 0; group < num_groups; first = ends[group++]) {
        const int64_t row = group * whole.num_rows;
        if (ends[group] > first)
            matrices[count++] = {behind(whole.tokens, first * depth), behind(whole.weights, row * depth),
                                 behind(whole.bias, row),
                                 static_cast<char*>(whole.results) + first * whole.num_rows * size,
                                 ends[group] - first, whole.num_rows};
    }
    multiply(matrices.get(), count, depth, numbers, vectors, num_threads, in_threads);
}

}  // namespace stand
