// The outcome of a verified draft: which of its nodes came true. Calibration learns from it.

#pragma once

#include <cstdint>
#include <vector>

#include "../store/lookup.h"

namespace stand {

// The drafts of all rows, and per row the accepted path (row-local nodes, root excluded) and the token after it.
struct Outcome {
    const int32_t* token_ids;       // [M]
    const int32_t* parents;         // [M] row-local, negative at each root
    const int32_t* offsets;         // [B + 1]
    const float* estimates;         // [M] product of the estimates along each node's path
    const int32_t* accepted;        // the rows' paths, one after the other
    const int64_t* accepted_ends;   // [B + 1]: row b's path is accepted[ends[b]] to accepted[ends[b + 1] - 1]
    const int32_t* next_tokens;     // [B], negative where the token after the path is unknown
    int64_t num_rows;
};

// The first row whose accepted nodes are no path from its root down, or -1.
inline int64_t first_broken_path(const Outcome& outcome) {
    for (int64_t row = 0; row < outcome.num_rows; ++row) {
        const int64_t first = outcome.offsets[row], num_nodes = outcome.offsets[row + 1] - first;
        int32_t above = 0;
        for (int64_t i = outcome.accepted_ends[row]; i < outcome.accepted_ends[row + 1]; ++i) {
            const int32_t node = outcome.accepted[i];
            if (node < 1 || node >= num_nodes || outcome.parents[first + node] != above) return row;
            above = node;
        }
    }
    return -1;
}

// `next`: it is the token after the path; what is below it nobody knows.
enum class Fate : uint8_t { missed, accepted, next, unknown };

// Per node of a row. Parents come before their children, so their fates are known.
inline std::vector<Fate> fates_of(const Outcome& outcome, int64_t row) {
    const int64_t first = outcome.offsets[row], num_nodes = outcome.offsets[row + 1] - first;
    const int32_t next_token = outcome.next_tokens[row];
    std::vector<Fate> fates(num_nodes, Fate::missed);
    int32_t last = 0;
    fates[last] = Fate::accepted;
    for (int64_t i = outcome.accepted_ends[row]; i < outcome.accepted_ends[row + 1]; ++i)
        fates[last = outcome.accepted[i]] = Fate::accepted;
    for (int64_t node = 1; node < num_nodes; ++node) {
        if (fates[node] == Fate::accepted) continue;
        const int32_t parent = outcome.parents[first + node];
        if (fates[parent] == Fate::next || fates[parent] == Fate::unknown || (parent == last && next_token < 0))
            fates[node] = Fate::unknown;
        else if (parent == last && outcome.token_ids[first + node] == next_token)
            fates[node] = Fate::next;
    }
    return fates;
}

// Trains on every node whose fate is known, row by row.
inline void record_outcome(const Outcome& outcome, DraftKind kind, BlendedLookup& lookup) {
    const std::lock_guard guard(lookup.mutex);
    Calibration& calibration = lookup.calibrations[static_cast<int32_t>(kind)];
    std::vector<int32_t> depths;
    for (int64_t row = 0; row < outcome.num_rows; ++row) {
        const std::vector<Fate> fates = fates_of(outcome, row);
        const int64_t first = outcome.offsets[row];
        depths.assign(fates.size(), 0);
        for (size_t node = 1; node < fates.size(); ++node) {
            depths[node] = depths[outcome.parents[first + node]] + 1;
            if (fates[node] == Fate::unknown) continue;
            calibration.train(outcome.estimates[first + node], depths[node], fates[node] != Fate::missed);
        }
    }
}

}  // namespace stand
