// Tokens in the order in which tiles read them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../../../simd/bfloat16.h"

namespace stand {

namespace dots {

// Most tokens of a tile, and terms that it loads at a time; both differ between instruction sets.
struct TileShape {
    int64_t tokens, step;
};

// As few tiles as hold all tokens, of nearly equal size.
struct Tiles {
    int64_t count, least, larger;  // the first `larger` ones have a token more than `least`

    Tiles(int64_t num_tokens, TileShape shape)
        : count((num_tokens + shape.tokens - 1) / shape.tokens),
          least(num_tokens / count),
          larger(num_tokens % count) {}

    int64_t begin(int64_t tile) const { return tile * least + std::min(tile, larger); }

    int64_t size(int64_t tile) const { return least + (tile < larger); }
};

// Terms of a packed token: the last ones are filled up with zeros.
inline int64_t packed_depth(int64_t depth, TileShape shape) {
    return (depth + shape.step - 1) / shape.step * shape.step;
}

// How many of them `pack_tokens` writes.
template <class Token>
int64_t packed_size(int64_t num_tokens, int64_t depth, TileShape shape) {
    return num_tokens * packed_depth(depth, shape);
}

// tokens [num_tokens, depth] -> packed: of one tile behind the other [packed_depth / step, its tokens, step].
template <class Number, class Token>
void pack_tokens(const Number* tokens, int64_t num_tokens, int64_t depth, TileShape shape, Token* packed) {
    const Tiles tiles(num_tokens, shape);
    for (int64_t tile = 0; tile < tiles.count; ++tile)
        for (int64_t k = 0; k < depth; k += shape.step)
            for (int64_t t = tiles.begin(tile); t < tiles.begin(tile) + tiles.size(tile); ++t, packed += shape.step) {
                const Number* own = tokens + t * depth + k;
                const int64_t terms = std::min(shape.step, depth - k);
                for (int64_t i = 0; i < terms; ++i)
                    if constexpr (std::is_same_v<Number, Token>) packed[i] = own[i];
                    else packed[i] = widened(own[i]);
                std::fill(packed + terms, packed + shape.step, Token{});
            }
}

}  // namespace dots

}  // namespace stand
