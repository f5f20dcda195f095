// Which tokens may follow the nodes of planned drafts, as masks of bits. A node is found by the tokens that lead to it
// from its row's root.

#pragma once

#include <cstdint>
#include <vector>

#include "../store/outside_laws.h"

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

// A mask at every node. Masks lie with whoever made them.
class TokenMasks {
   public:
    explicit TokenMasks(const TokenMask& first) : first_(first) {}

    int64_t num_rows() const { return static_cast<int64_t>(roots_.size()); }

    void add_root() {
        roots_.push_back(static_cast<int32_t>(nodes_.size()));
        nodes_.push_back(Node{0, NOWHERE, NOWHERE});
    }

    // A node of the last row below its node `parent`.
    void add_node(int32_t parent, uint32_t token) {
        const int32_t number = static_cast<int32_t>(nodes_.size());
        int32_t& first_child = nodes_[roots_.back() + parent].first_child;
        const Node node{token, NOWHERE, first_child};
        first_child = number;
        nodes_.push_back(node);
    }

    int32_t root(int64_t row) const { return roots_[row]; }

    // The node one token below another one, or NOWHERE.
    int32_t child(int32_t node, uint32_t token) const {
        int32_t at = nodes_[node].first_child;
        while (at != NOWHERE && nodes_[at].token != token) at = nodes_[at].next;
        return at;
    }

    TokenMask at(int32_t node) const {
        TokenMask found = first_;
        found.words += static_cast<int64_t>(node) * first_.size;
        return found;
    }

   private:
    struct Node {
        uint32_t token;
        int32_t first_child, next;  // next: of its parent's children
    };
    const TokenMask first_;  // that of the first node
    std::vector<int32_t> roots_;  // [B]
    std::vector<Node> nodes_;
};

}  // namespace stand
