// Drafts as serving engines hold them: one chain per row, or as many nodes for every row with a matrix of ancestors.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace stand {

// The drafts of a step. `path_probabilities` may be null.
struct DraftView {
    const int32_t* token_ids;           // [M]
    const int32_t* parents;             // [M] row-local, before their children, negative at each root
    const int32_t* offsets;             // [B + 1]
    const float* path_probabilities;    // [M]
    int64_t num_rows;
};

// By node of a row: what best_path adds up. Its memory is used for all rows.
struct PathSums {
    std::vector<float> sums;
    std::vector<int32_t> depths;
};

// The best path of a row, of at most `most` nodes below the root: the one with the largest sum of path probabilities,
// which is the expected number of accepted tokens; without them the longest. Of equals the one that was revealed first.
inline void best_path(const DraftView& drafts, int64_t row, int32_t most, PathSums& scratch,
                      std::vector<int32_t>& path) {
    const int32_t first = drafts.offsets[row], num_nodes = drafts.offsets[row + 1] - first;
    scratch.sums.assign(num_nodes, 0.0f);
    scratch.depths.assign(num_nodes, 0);
    float* sums = scratch.sums.data();
    int32_t* depths = scratch.depths.data();
    int32_t best = 0;
    for (int32_t node = 1; node < num_nodes; ++node) {
        const int32_t parent = drafts.parents[first + node];
        depths[node] = depths[parent] + 1;
        const float gain = drafts.path_probabilities == nullptr ? 1.0f : drafts.path_probabilities[first + node];
        sums[node] = sums[parent] + gain;
        if (depths[node] <= most && sums[node] > sums[best]) best = node;
    }
    path.resize(depths[best]);
    for (int32_t node = best; node > 0; node = drafts.parents[first + node])
        path[depths[node] - 1] = drafts.token_ids[first + node];
}

// The first row with more than `num_nodes` nodes, or -1.
inline int64_t first_too_large(const DraftView& drafts, int64_t num_nodes) {
    for (int64_t row = 0; row < drafts.num_rows; ++row)
        if (drafts.offsets[row + 1] - drafts.offsets[row] > num_nodes) return row;
    return -1;
}

// token_ids [B, d]; masks [B, d, d]: mask[i][j] is 1 where node j is i or above it, else 0.
// Rows with fewer nodes are padded by a chain below their last node, which has no child: no node has two equal
// children.
template <typename Flag>
inline void pad_with_ancestors(const DraftView& drafts, int64_t num_nodes, int32_t pad, int32_t* token_ids,
                               Flag* masks) {
    for (int64_t row = 0; row < drafts.num_rows; ++row) {
        const int64_t first = drafts.offsets[row], size = drafts.offsets[row + 1] - first;
        int32_t* tokens = token_ids + row * num_nodes;
        Flag* mask = masks + row * num_nodes * num_nodes;
        std::copy(drafts.token_ids + first, drafts.token_ids + first + size, tokens);
        std::fill(tokens + size, tokens + num_nodes, pad);
        for (int64_t node = 0; node < num_nodes; ++node) {
            const int64_t parent = node < size ? drafts.parents[first + node] : node - 1;
            Flag* line = mask + node * num_nodes;
            if (parent >= 0) std::copy(mask + parent * num_nodes, mask + (parent + 1) * num_nodes, line);
            else std::fill(line, line + num_nodes, Flag{0});
            line[node] = 1;
        }
    }
}

}  // namespace stand
