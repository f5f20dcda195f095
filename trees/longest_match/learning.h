// Teaching a lookup tree: from a run of tokens, and from every scored node of a step.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../include/window.h"
#include "table.h"

namespace stand {

// `tokens` holds `num_before` context tokens, then `num_scored` tokens that followed; law i is that of the i-th of
// those. Without laws (ids null) each is a one-hot.
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

// Teaches law i of `ids` and `probs` to the context that ends in node i, for the given nodes in their order.
inline void learn_nodes(Lookup& lookup, const StepView& step, const int64_t* nodes, int64_t num_nodes,
                        const int32_t* ids, const float* probs, int32_t width) {
    const std::lock_guard<std::mutex> guard(lookup.mutex);
    const auto learn = [&](int64_t node, int64_t, const int32_t* window, int32_t available) {
        lookup.observe(window, available, ids + node * width, probs + node * width, width);
    };
    for_each_window<int32_t, Lookup::MAX_ORDER>(step, nodes, num_nodes, learn);
}

}  // namespace stand
