// Laws from outside of a lookup: what a trained head says comes next, at the nodes of a small tree per row.
//
// A node is found by the tokens that lead to it from its row's root. A node of ANY_TOKEN is found by every token that
// none of its siblings has: for heads that guess a place whatever stands before it.

#pragma once

#include <cstdint>
#include <vector>

namespace stand {

constexpr int32_t NOWHERE = -1;    // no node
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

    int64_t num_rows() const { return static_cast<int64_t>(roots_.size()); }
    int64_t num_nodes() const { return static_cast<int64_t>(nodes_.size()); }

    // The next row, which has no nodes yet.
    void add_row() { roots_.push_back(NOWHERE); }

    // A node of the last row below another one of it, or its root where `parent` is NOWHERE. Returns its number among
    // all nodes; NOWHERE where the row has a root, or the parent a child of this token, already.
    int32_t add_node(int32_t parent, int32_t token) {
        int32_t* link = parent == NOWHERE ? &roots_.back() : &nodes_[parent].first_child;
        for (; *link != NOWHERE; link = &nodes_[*link].next)
            if (parent == NOWHERE || nodes_[*link].token == token) return NOWHERE;
        const int32_t number = static_cast<int32_t>(nodes_.size());
        *link = number;
        const int32_t depth = parent == NOWHERE ? 0 : nodes_[parent].depth + 1;
        nodes_.push_back(Node{token, NOWHERE, NOWHERE, depth, static_cast<int32_t>(tokens_.size()), 0});
        return number;
    }

    // The next token of the last node's law. False where the law has it, is full, or has a less likely token before.
    bool add_token(uint32_t token, float probability) {
        Node& node = nodes_.back();
        for (int32_t i = node.first; i < node.first + node.size; ++i)
            if (tokens_[i] == token || probabilities_[i] < probability) return false;
        if (node.size == MAX_LAW_SIZE) return false;
        tokens_.push_back(token);
        probabilities_.push_back(probability);
        ++node.size;
        return true;
    }

    int32_t root(int64_t row) const { return roots_[row]; }

    // The node one token below another one, or NOWHERE.
    int32_t child(int32_t node, uint32_t token) const {
        int32_t any = NOWHERE;
        for (int32_t at = nodes_[node].first_child; at != NOWHERE; at = nodes_[at].next) {
            if (nodes_[at].token == static_cast<int32_t>(token)) return at;
            if (nodes_[at].token == ANY_TOKEN) any = at;
        }
        return any;
    }

    OutsideLaw at(int32_t node) const {
        const Node& found = nodes_[node];
        return {tokens_.data() + found.first, probabilities_.data() + found.first, found.size, found.depth, source_};
    }

   private:
    struct Node {
        int32_t token, first_child, next, depth;  // next: of its parent's children
        int32_t first, size;                      // of its law
    };
    const int32_t source_;
    std::vector<int32_t> roots_;  // [B]
    std::vector<Node> nodes_;
    std::vector<uint32_t> tokens_;  // of all laws
    std::vector<float> probabilities_;
};

}  // namespace stand
