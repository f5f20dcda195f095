// Windows: the tokens that end at a node of a draft, newest first. They are the context that a lookup asks.

#pragma once

#include <algorithm>
#include <cstdint>

namespace stand {

// One row's nodes and the tokens before its root.
struct RowView {
    const int32_t* token_ids;  // by row-local node
    const int32_t* parents;    // row-local, negative at the root
    const int32_t* history;    // newest first, without the root
    int32_t history_size;
};

// The node's path up to the root, then the row's history: at most `limit` tokens. Returns how many.
template <typename Token>
inline int32_t node_window(const RowView& row, int32_t node, int32_t limit, Token* window) {
    int32_t available = 0;
    for (; node >= 0 && available < limit; node = row.parents[node])
        window[available++] = static_cast<Token>(row.token_ids[node]);
    for (int32_t age = 0; age < row.history_size && available < limit; ++age)
        window[available++] = static_cast<Token>(row.history[age]);
    return available;
}

// The drafts of a step.
struct StepView {
    const int32_t* token_ids;      // [M]
    const int32_t* parents;        // [M] row-local
    const int32_t* offsets;        // [B + 1]
    int64_t num_rows;
    const int32_t* histories;      // [B, history_limit], newest first, without the roots
    const int32_t* history_sizes;  // [B]
    int32_t history_limit;

    int64_t row_of(int64_t node) const { return std::upper_bound(offsets, offsets + num_rows + 1, node) - offsets - 1; }

    RowView row(int64_t row) const {
        return RowView{token_ids + offsets[row], parents + offsets[row], histories + row * history_limit,
                       history_sizes[row]};
    }
};

// Visits the windows of some nodes (packed) in their order: visit(node, row, window, size of the window).
template <typename Token, int32_t LIMIT, typename Visit>
inline void for_each_window(const StepView& step, const int64_t* nodes, int64_t num_nodes, Visit visit) {
    Token window[LIMIT];
    for (int64_t i = 0; i < num_nodes; ++i) {
        const int64_t row = step.row_of(nodes[i]);
        const int32_t local = static_cast<int32_t>(nodes[i] - step.offsets[row]);
        const int32_t available = node_window(step.row(row), local, step.history_limit, window);
        visit(nodes[i], row, window, available);
    }
}

}  // namespace stand
