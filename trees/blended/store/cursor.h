// Where the last tokens of a text lead: the contexts that end at one position, by length.

#pragma once

#include "odds.h"

namespace stand {

constexpr uint32_t NO_NEWEST = 0xFFFFFFFFu;

// What a draft needs: the blocks, up to the longest context that exists, and the token that they end with.
struct Contexts {
    int32_t longest = 0;
    uint32_t token = NO_NEWEST;
    uint32_t skip = 0;  // block of order SKIP
    uint32_t blocks[MAX_DEPTH + 1];  // of orders 1 .. longest, 0 where there is none
};

// What learning needs. Where a block is missing but the context without its newest token has an entry for it,
// `parents` has that context's block: the block can be made there.
struct Cursor {
    uint32_t blocks[NUM_ORDERS] = {};
    uint32_t parents[NUM_ORDERS] = {};
    uint32_t token = NO_NEWEST, token_before = NO_NEWEST;

    Cursor() = default;
    // Only good to advance from.
    explicit Cursor(const Contexts& contexts) : token(contexts.token) {
        std::copy(contexts.blocks + 1, contexts.blocks + 1 + contexts.longest, blocks + 1);
    }
};

// The longest context that knows what follows, of blocks by order; null where none does.
inline const Block* longest_known(const Arena& arena, const uint32_t* blocks, int32_t longest) {
    for (int32_t order = longest; order >= 1; --order)
        if (blocks[order] != 0 && arena.at(blocks[order])->size > 0) return arena.at(blocks[order]);
    return nullptr;
}

}  // namespace stand
