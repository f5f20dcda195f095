// Writes grown drafts into the arrays of a batch.

#pragma once

#include "growth.h"

namespace stand {

// Where the nodes of all rows go: row b's from offsets[b] on.
struct DraftSink {
    const int32_t* offsets;
    int32_t* token_ids;
    int32_t* parents;  // row-local
    int32_t* depths;
    int32_t* ranks;
    float* path_probabilities;
    float* path_estimates;  // before calibration
    int32_t* support_ids;  // [M, width], filled with NO_TOKEN by the caller
    float* law;            // [M, width], filled with 0 by the caller
    int32_t width;         // law_width()
};

// The number of candidates that the widest law covers.
inline int32_t law_width(const Growth& growth) {
    if (growth.kind() != DraftKind::deterministic) return growth.num_candidates();
    int32_t most = 1;
    for (const GrownNode& node : growth.nodes) most = std::max(most, node.num_children);
    return most;
}

// A sampled child's own law, or a one-hot. In deterministic drafts the law covers the children.
inline void write_law(const Growth& growth, const DraftSink& sink, const GrownNode& node) {
    const GrownNode& parent = growth.nodes[node.parent];
    const Candidates& candidates = growth.candidates;
    float* law = sink.law + static_cast<int64_t>(sink.offsets[node.row] + node.local) * sink.width;
    if (node.law >= 0) {
        std::copy_n(candidates.law(node.law), candidates.size(parent.candidates), law);
    } else if (parent.candidates >= 0) {
        const Candidates::Entry* entry = candidates.of(parent.candidates);
        while (entry->token != node.token) ++entry, ++law;
        *law = 1.0f;
    } else {
        const int64_t at = sink.offsets[node.row] + parent.local;
        sink.support_ids[at * sink.width + node.rank] = static_cast<int32_t>(node.token);
        law[node.rank] = 1.0f;
    }
}

inline void write_draft(const Growth& growth, const DraftSink& sink) {
    for (const GrownNode& node : growth.nodes) {
        const int32_t at = sink.offsets[node.row] + node.local;
        sink.token_ids[at] = static_cast<int32_t>(node.token);
        sink.parents[at] = node.parent < 0 ? -1 : growth.nodes[node.parent].local;
        sink.depths[at] = node.depth;
        sink.ranks[at] = node.rank;
        sink.path_probabilities[at] = node.path;
        sink.path_estimates[at] = node.product;
        if (node.candidates >= 0) {
            const Candidates::Entry* entries = growth.candidates.of(node.candidates);
            int32_t* ids = sink.support_ids + static_cast<int64_t>(at) * sink.width;
            for (int32_t position = 0; position < growth.candidates.size(node.candidates); ++position)
                ids[position] = static_cast<int32_t>(entries[position].token);
        }
        if (node.parent >= 0) write_law(growth, sink, node);
    }
}

}  // namespace stand
