// Teaching a lookup tree: from a run of tokens, and from every scored node of a step.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "table.h"

namespace stand {

constexpr float LARGEST_PROBABILITY = 1.001f;  // room for the rounding of a softmax in low precision

// The first entry that no row may hold, or -1.
inline int64_t first_bad_entry(const int32_t* ids, const float* probs, int64_t num_entries) {
    for (int64_t entry = 0; entry < num_entries; ++entry) {
        const bool fine = ids[entry] >= NO_TOKEN && probs[entry] >= 0.0f && probs[entry] <= LARGEST_PROBABILITY;
        if (!fine) return entry;
    }
    return -1;
}

inline int64_t first_negative(const int32_t* values, int64_t num_values) {
    for (int64_t position = 0; position < num_values; ++position)
        if (values[position] < 0) return position;
    return -1;
}

// `tokens` holds `num_before` context tokens, then `num_scored` tokens that followed; row i is the law of the i-th of
// those. Without rows (ids null) each is a one-hot.
inline void learn_run(Lookup& lookup, const int32_t* tokens, int64_t num_before, int64_t num_scored,
                      const int32_t* ids, const float* probs, int32_t width) {
    const std::lock_guard<std::mutex> guard(lookup.mutex);
    const float certain = 1.0f;
    int32_t window[Lookup::MAX_ORDER];
    for (int64_t i = 0; i < num_scored; ++i) {
        const int64_t end = num_before + i;
        const int32_t available = static_cast<int32_t>(std::min<int64_t>(end, lookup.max_order()));
        for (int32_t age = 0; age < available; ++age) window[age] = tokens[end - 1 - age];
        if (ids == nullptr)
            lookup.observe(window, available, tokens + end, &certain, 1);
        else
            lookup.observe(window, available, ids + i * width, probs + i * width, width);
    }
}

// The drafts of a step and, per row, the window of tokens that stands before its root.
struct StepView {
    const int32_t* token_ids;     // [M]
    const int32_t* parents;       // [M] row-local
    const int32_t* offsets;       // [B + 1]
    int64_t num_rows;
    const int32_t* windows;       // [B, max_order], newest first
    const int32_t* window_sizes;  // [B]
};

// The window of a node: its path from newest to root, then the row's history. Returns its length.
inline int32_t node_window(const StepView& step, int64_t row, int64_t node, int32_t max_order, int32_t* window) {
    const int64_t first = step.offsets[row];
    int32_t available = 0;
    for (int64_t local = node - first; local >= 0 && available < max_order; local = step.parents[first + local])
        window[available++] = step.token_ids[first + local];
    const int32_t* history = step.windows + row * max_order;
    for (int32_t age = 0; age < step.window_sizes[row] && available < max_order; ++age)
        window[available++] = history[age];
    return available;
}

// Teaches row i of `ids` and `probs` to the context that ends in node i, for the given nodes in their order.
inline void learn_nodes(Lookup& lookup, const StepView& step, const int64_t* nodes, int64_t num_nodes,
                        const int32_t* ids, const float* probs, int32_t width) {
    const std::lock_guard<std::mutex> guard(lookup.mutex);
    int32_t window[Lookup::MAX_ORDER];
    for (int64_t position = 0; position < num_nodes; ++position) {
        const int64_t node = nodes[position];
        const int32_t* end = std::upper_bound(step.offsets, step.offsets + step.num_rows + 1, node);
        const int64_t row = (end - step.offsets) - 1;
        const int32_t available = node_window(step, row, node, lookup.max_order(), window);
        lookup.observe(window, available, ids + node * width, probs + node * width, width);
    }
}

}  // namespace stand
