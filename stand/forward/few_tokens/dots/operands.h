// What the loops of this folder work on.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../simd/bfloat16.h"

namespace stand {

// Sums are floats, whatever the rest is.
template <class Number, class Token = float>
struct Product {
    const Token* tokens;       // [num_tokens, depth], packed
    const Number* weights;     // [num_rows, depth]
    const Number* bias;        // [num_rows], or null
    float* results;            // [num_tokens, num_rows], `stride` apart; null where they are narrow
    Bfloat16* narrow_results;  // as `results`
    int64_t num_tokens, num_rows, depth, stride;
};

// One layer's attention of packed tokens, each over its row's committed keys and its own path. Distances are in
// numbers, which are floats or Bfloat16.
struct Attention {
    const void* queries;             // [num_tokens, num_key_heads * groups, size], with two distances of their own
    const void* keys;                // [num_rows, num_key_heads, slots, size], with two distances of their own
    const void* values;              // as keys
    void* mixed;                     // [num_tokens, num_key_heads * groups, size]
    const int64_t* offsets;          // [num_rows + 1]: where a row's tokens begin
    const int64_t* lengths;          // [num_rows]: committed keys
    const int64_t* tails;            // [num_rows]: keys behind the committed ones
    const int64_t* path_offsets;     // [num_tokens + 1]
    const int32_t* paths;            // the ancestors of a token and itself, counted from the first key behind `lengths`
    int64_t query_stride, query_head_stride, row_stride, head_stride;
    int64_t num_rows, num_key_heads, groups, size;
    int64_t window;                  // keys that a token sees, itself among them; 0 for all
    float scale;                     // of the products of queries and keys

    int64_t num_heads() const { return num_key_heads * groups; }

    int64_t path_length(int64_t token) const { return path_offsets[token + 1] - path_offsets[token]; }

    // The first key that a token sees, where its path's follow the committed ones.
    int64_t first_seen(int64_t row, int64_t token) const {
        return window > 0 ? std::max<int64_t>(lengths[row] + path_length(token) - window, 0) : 0;
    }
};

}  // namespace stand
