// How unlikely a node growth looks for. These thresholds save time: growth that looked for every node would draft a
// slightly better tree.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../../include/sampling.h"

namespace stand {

// `least`: growth does not look for nodes whose path probability is below. It falls when better ones are used up.
struct Thresholds {
    float least;
    float lowering;  // factor by which `least` falls
    float fineness;  // share of `least` below which a single piece of evidence is left out
    float hopeless;  // below this, what competes is forgotten
    // Growth looks for a node's children when no better item is left than a child with this share of the node's path
    // probability. A likelier child comes a little late, but many nodes are never expanded without need.
    float patience;

    Thresholds() = default;
    Thresholds(DraftKind kind, int32_t num_rows, int32_t budget, float floor);
};

namespace threshold {
// For one row.
constexpr float LEAST = 0.03f;     // `least` starts here, or lower where the budget reaches lower
constexpr float LOWERING = 0.2f;   // `least` falls by this factor
constexpr float FINENESS = 0.1f;   // evidence counts down to this share of `least`
constexpr float HOPELESS = 0.1f;   // items are kept down to this share of the first `least`
constexpr float PATIENCE = 0.5f;   // nodes are expanded at this share of their path probability
constexpr float CHAIN_LEAST = 0.1f;  // of a chain's node only the best child is wanted: less seldom decides which
// These are added with very many rows. The probability of the last node varies from step to step for one row, but
// little for many rows together, and some row always has a node that is nearly as good. So growth looks for fewer.
constexpr float MORE_LEAST = 0.02f;
constexpr float MORE_LOWERING = 0.2f;
constexpr float MORE_FINENESS = 0.05f;
constexpr float LESS_PATIENCE = 0.1f;
constexpr float PRICE = 0.4f;        // path probability of the last node, times the nodes per row, roughly
constexpr float FLOOR_SHARE = 0.2f;  // `least` starts at no less than this share of the caller's floor
}  // namespace threshold

// Where children are sampled, rows do not help each other: laws cover only the candidates that were found.
inline Thresholds::Thresholds(DraftKind kind, int32_t num_rows, int32_t budget, float floor) {
    using namespace threshold;
    const float rows = static_cast<float>(num_rows);
    const float company = kind == DraftKind::deterministic ? 1.0f - 1.0f / rows : 0.0f;  // 0 alone, 1 with many rows
    const float last = PRICE * rows / std::max(1, budget);
    least = std::max(FLOOR_SHARE * floor, std::min(LEAST + MORE_LEAST * company, last));
    lowering = LOWERING + MORE_LOWERING * company;
    fineness = FINENESS + MORE_FINENESS * company;
    hopeless = HOPELESS * least;
    patience = PATIENCE - LESS_PATIENCE * company;
}

}  // namespace stand
