// Laws from outside of a lookup: what a trained head says comes next, at the nodes of a small tree per row.
//
// A node of ANY_TOKEN is found by every token that none of its siblings has: for heads that guess a place whatever
// stands before it. A node without children goes on as that sibling does: for heads that look at one token before.

#pragma once

#include <cstdint>
#include <vector>

#include "path_tree.h"

namespace stand {

constexpr int32_t ANY_TOKEN = -2;
constexpr int32_t NUM_SOURCES = 4;  // heads whose worth is learned apart
constexpr int32_t MAX_LAW_SIZE = 64;

// A law, likeliest token first. Mass that is missing to 1 was cut.
struct OutsideLaw {
    const uint32_t* tokens;
    const float* probabilities;
    int32_t size;
    int32_t depth;  // of its node; 0 at the root
    int32_t source;
};

class OutsideLaws {
   public:
    explicit OutsideLaws(int32_t source) : source_(source) {}

    int64_t num_rows() const { return tree_.num_rows(); }
    int64_t num_nodes() const { return tree_.num_nodes(); }
    void add_row() { tree_.add_row(); }

    // As in `PathTree`, but NOWHERE where the row has a root, or the parent a child of this token, already.
    int32_t add_node(int32_t parent, int32_t token) {
        const int32_t known = parent == NOWHERE ? tree_.root(tree_.num_rows() - 1) : tree_.child(parent, token);
        if (known != NOWHERE) return NOWHERE;
        const int32_t depth = parent == NOWHERE ? 0 : laws_[parent].depth + 1;
        laws_.push_back(Law{depth, static_cast<int32_t>(tokens_.size()), 0, parent});
        return tree_.add_node(parent, token);
    }

    // The next token of the last node's law. False where the law has it, is full, or has a less likely token before.
    bool add_token(uint32_t token, float probability) {
        Law& law = laws_.back();
        for (int32_t i = law.first; i < law.first + law.size; ++i)
            if (tokens_[i] == token || probabilities_[i] < probability) return false;
        if (law.size == MAX_LAW_SIZE) return false;
        tokens_.push_back(token);
        probabilities_.push_back(probability);
        ++law.size;
        return true;
    }

    int32_t root(int64_t row) const { return tree_.root(row); }

    // The node one token below another one, or NOWHERE.
    int32_t child(int32_t node, uint32_t token) const {
        const int32_t above = tree_.has_children(node) ? node : any_sibling(node);
        if (above == NOWHERE) return NOWHERE;
        const int32_t found = tree_.child(above, static_cast<int32_t>(token));
        return found != NOWHERE ? found : tree_.child(above, ANY_TOKEN);
    }

    OutsideLaw at(int32_t node) const {
        const Law& found = laws_[node];
        return {tokens_.data() + found.first, probabilities_.data() + found.first, found.size, found.depth, source_};
    }

   private:
    struct Law {
        int32_t depth, first, size, parent;  // depth and parent: of its node
    };

    // Of ANY_TOKEN, or NOWHERE.
    int32_t any_sibling(int32_t node) const {
        const int32_t parent = laws_[node].parent;
        return parent == NOWHERE ? NOWHERE : tree_.child(parent, ANY_TOKEN);
    }

    const int32_t source_;
    PathTree tree_;
    std::vector<Law> laws_;  // by node
    std::vector<uint32_t> tokens_;  // of all laws
    std::vector<float> probabilities_;
};

}  // namespace stand
