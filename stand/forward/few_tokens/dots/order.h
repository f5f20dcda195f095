// The order in which a product's rows and tokens are multiplied.
//
// Rows come from memory once. What is read again and again meanwhile has to lie in the first cache: the tokens. So they
// are taken in chunks, and where even a chunk's terms are too many, these in blocks; the sums of a block wait in the
// second cache until the same rows come with the next one.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "first_cache.h"
#include "maker.h"
#include "packed_tokens.h"

namespace stand {

namespace dots {

constexpr int32_t ROWS = 4;           // of a tile
constexpr int64_t BAND = 32;          // rows that go through all chunks and blocks together

// Of a chunk, at most: as many as hold 18 tokens.
constexpr int64_t most_tiles(TileShape shape) { return 18 / shape.tokens; }

// Which of the terms that come next are asked of memory meanwhile, in numbers from here: twice, because a processor
// drops such wishes when it has many. On Intel's, where several tiles ask, more wishes than one take longer than they
// save. With zeros nothing is asked for: what is here has come.
struct Ahead {
    int64_t near, far;
};

struct Order {
    Tiles tiles;
    int64_t num_chunks;
    int64_t whole;  // terms in whole steps
    int64_t block;  // terms, in whole steps
    int64_t band;   // rows; all where they go through one chunk and one block

    // token_size: bytes of a term.
    [[gnu::noinline]] Order(int64_t num_tokens, int64_t depth, TileShape shape, int64_t token_size)
        : tiles(num_tokens, shape), whole(depth / shape.step * shape.step) {
        const int64_t chunk_tiles = most_tiles(shape), steps = std::max<int64_t>(whole / shape.step, 1);
        num_chunks = (tiles.count + chunk_tiles - 1) / chunk_tiles;
        const int64_t tokens = (num_tokens + num_chunks - 1) / num_chunks;
        const int64_t fitting = first_cache() / ((tokens + ROWS) * shape.step * token_size);
        const int64_t num_blocks = (steps + fitting - 1) / fitting;
        block = (steps + num_blocks - 1) / num_blocks * shape.step;
        band = num_blocks == 1 && num_chunks == 1 ? std::numeric_limits<int64_t>::max() : BAND;
    }

    int64_t first_tile(int64_t chunk) const { return tiles.count * chunk / num_chunks; }

    // From the terms `k` of `row` to those that the same row of a tile multiplies after them, in a band [begin, end).
    [[gnu::noinline]] Ahead ahead(int64_t depth, int64_t begin, int64_t end, int64_t row, int64_t k) const {
        const auto distance = [&](int64_t later) {
            if (row + later < end) return later * depth;
            if (k + block < whole) return (later - (end - begin)) * depth + block;
            return later * depth - k;
        };
        return {distance(ROWS), tiles.count > 1 && is_intel() ? 0 : distance(2 * ROWS)};
    }
};

}  // namespace dots

}  // namespace stand
