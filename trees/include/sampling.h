// Drawing children of a node from a law over candidates, and the laws that they are drawn from.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace stand {

// How children are chosen. The first NUM_GROWN_KINDS are open to best-first growth too.
enum class DraftKind : int32_t { sampled = 0, mixed = 1, deterministic = 2, coupled = 3, independent = 4 };
constexpr int32_t NUM_GROWN_KINDS = 3;

// Children of one node in reveal order. A pick is the position of a candidate; child c has its law over all candidates
// at laws[c * number of candidates].
struct Children {
    std::vector<int32_t> picks;
    std::vector<float> laws;
};

// The law of the next child: the candidates not yet taken, renormalised. The remaining mass is summed, because a
// subtraction would lose small probabilities. False where nothing remains.
inline bool append_law(const float* probabilities, int32_t size, const std::vector<char>& taken,
                       std::vector<float>& laws) {
    double mass = 0.0;
    for (int32_t position = 0; position < size; ++position)
        if (!taken[position]) mass += probabilities[position];
    if (!(mass > 0.0)) return false;
    for (int32_t position = 0; position < size; ++position)
        laws.push_back(taken[position] ? 0.0f : static_cast<float>(probabilities[position] / mass));
    return true;
}

// Sampling without replacement (Gumbel-Top-K) is the same as a race: candidate j arrives at -log(u_j) / p_j, and
// candidates are drawn in the order of their arrival. Equal uniforms give the top k (ties: the earlier position).
inline double arrival(float probability, double uniform) { return -std::log(uniform) / probability; }

// Draws up to num_children children without replacement. Positions already taken do not run.
inline void race(const float* probabilities, const double* uniforms, int32_t size, int32_t num_children,
                 std::vector<char>& taken, Children& children) {
    std::vector<std::pair<double, int32_t>> arrivals;
    arrivals.reserve(size);
    for (int32_t position = 0; position < size; ++position)
        if (!taken[position] && probabilities[position] > 0.0f)
            arrivals.emplace_back(arrival(probabilities[position], uniforms[position]), position);
    const size_t num_drawn = std::min<size_t>(num_children, arrivals.size());
    std::partial_sort(arrivals.begin(), arrivals.begin() + num_drawn, arrivals.end());
    for (size_t rank = 0; rank < num_drawn; ++rank) {
        append_law(probabilities, size, taken, children.laws);
        children.picks.push_back(arrivals[rank].second);
        taken[arrivals[rank].second] = 1;
    }
}

inline void take_top(int32_t size, int32_t num_children, Children& children) {
    for (int32_t position = 0; position < std::min(num_children, size); ++position) {
        children.picks.push_back(position);
        children.laws.insert(children.laws.end(), size, 0.0f);
        children.laws[children.laws.size() - size + position] = 1.0f;
    }
}

// One sampled child from outside the num_children - 1 likeliest tokens, verified first, then those, one-hot.
inline void draw_mixed(const float* probabilities, const double* uniforms, int32_t size, int32_t num_children,
                       Children& children) {
    std::vector<char> taken(size, 0);
    std::fill(taken.begin(), taken.begin() + std::min(num_children - 1, size), char(1));
    race(probabilities, uniforms, size, 1, taken, children);
    take_top(size, num_children - 1, children);
}

// Draws with replacement, one uniform per child: siblings may be equal, and all have the same law.
inline void draw_independent(const float* probabilities, const double* uniforms, int32_t size, int32_t num_children,
                             Children& children) {
    const std::vector<char> taken(size, 0);
    double mass = 0.0;
    for (int32_t position = 0; position < size; ++position) mass += probabilities[position];
    for (int32_t child = 0; child < num_children; ++child) {
        if (!append_law(probabilities, size, taken, children.laws)) return;
        double point = uniforms[child] * mass;
        int32_t pick = 0;
        while (pick + 1 < size && probabilities[pick + 1] > 0.0f && point >= probabilities[pick])
            point -= probabilities[pick++];
        children.picks.push_back(pick);
    }
}

// `probabilities` are in descending order. One uniform per candidate; kind independent: one per child as well.
inline void draw_children(DraftKind kind, const float* probabilities, const double* uniforms, int32_t size,
                          int32_t num_children, Children& children) {
    children.picks.clear();
    children.laws.clear();
    if (kind == DraftKind::deterministic) {
        take_top(size, num_children, children);
    } else if (kind == DraftKind::mixed) {
        draw_mixed(probabilities, uniforms, size, num_children, children);
    } else if (kind == DraftKind::independent) {
        draw_independent(probabilities, uniforms, size, num_children, children);
    } else {
        std::vector<char> taken(size, 0);
        race(probabilities, uniforms, size, num_children, taken, children);
    }
}

}  // namespace stand
