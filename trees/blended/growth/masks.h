// Which tokens may follow the nodes of planned drafts, as masks of bits.

#pragma once

#include <cstdint>

#include "../store/path_tree.h"

namespace stand {

// Bit t % 32 of word t / 32 says whether token t may follow.
struct TokenMask {
    const uint32_t* words;
    int32_t size;        // in words
    bool allows_beyond;  // whether tokens may follow that it has no bits for

    bool tells_of(uint32_t token) const { return token / 32 < static_cast<uint32_t>(size); }

    bool allows(uint32_t token) const {
        return tells_of(token) ? words[token / 32] >> token % 32 & 1 : allows_beyond;
    }

    // The number of bits, or as many as `enough` at least.
    int32_t count(int32_t enough) const {
        int32_t found = 0;
        for (int32_t word = 0; word < size && found < enough; ++word) found += __builtin_popcount(words[word]);
        return found;
    }

    // Calls `visit` with every token that has a bit.
    template <typename Visit>
    void each(Visit visit) const {
        for (int32_t word = 0; word < size; ++word)
            for (uint32_t bits = words[word]; bits != 0; bits &= bits - 1) visit(32 * word + __builtin_ctz(bits));
    }
};

// A mask at every node, in the order of their numbers. Masks lie with whoever made them.
class TokenMasks {
   public:
    PathTree tree;

    explicit TokenMasks(const TokenMask& first) : first_(first) {}

    TokenMask at(int32_t node) const {
        TokenMask found = first_;
        found.words += static_cast<int64_t>(node) * first_.size;
        return found;
    }

   private:
    const TokenMask first_;  // that of the first node
};

}  // namespace stand
