// A small tree of tokens per row. A node is found by the tokens that lead to it from its row's root.

#pragma once

#include <cstdint>
#include <vector>

namespace stand {

constexpr int32_t NOWHERE = -1;  // no node

class PathTree {
   public:
    int64_t num_rows() const { return static_cast<int64_t>(roots_.size()); }
    int64_t num_nodes() const { return static_cast<int64_t>(nodes_.size()); }

    // The next row, which has no nodes yet.
    void add_row() { roots_.push_back(NOWHERE); }

    // A node of the last row below another one of it, or its root where `parent` is NOWHERE. Returns its number among
    // all nodes.
    int32_t add_node(int32_t parent, int32_t token) {
        const int32_t number = static_cast<int32_t>(nodes_.size());
        int32_t& link = parent == NOWHERE ? roots_.back() : nodes_[parent].first_child;
        const Node node{token, NOWHERE, link};
        link = number;
        nodes_.push_back(node);
        return number;
    }

    int32_t root(int64_t row) const { return roots_[row]; }
    bool has_children(int32_t node) const { return nodes_[node].first_child != NOWHERE; }

    // The node one token below another one, or NOWHERE.
    int32_t child(int32_t node, int32_t token) const {
        int32_t at = nodes_[node].first_child;
        while (at != NOWHERE && nodes_[at].token != token) at = nodes_[at].next;
        return at;
    }

   private:
    struct Node {
        int32_t token, first_child, next;  // next: of its parent's children
    };
    std::vector<int32_t> roots_;  // [B]
    std::vector<Node> nodes_;
};

}  // namespace stand
