// Corrects path probabilities by factors for depth and probability, learned from the outcomes of earlier drafts.
//
// A path's probability is a product of estimates. Each is right on average over all contexts, but a draft starts where
// the one before went wrong, which makes its first token harder, and a path whose first tokens come true is likely to
// stay true. Neither shows in any single context; here the products are set right by counting.

#pragma once

#include <algorithm>
#include <cstdint>

#include "float_bits.h"

namespace stand {

class Calibration {
   public:
    static constexpr int32_t NUM_DEPTHS = 6, OCTAVES = 8, NUM_KNOTS = 4 * OCTAVES + 1;
    static constexpr int32_t NUM_FACTORS = NUM_DEPTHS * NUM_KNOTS;
    static constexpr float LEAST_FACTOR = 0.2f, MOST_FACTOR = 3.0f;

    float factors[NUM_FACTORS];

    Calibration() {
        std::fill(factors, factors + NUM_FACTORS, 1.0f);
        std::fill(weights_, weights_ + NUM_FACTORS, 0.0f);
    }

    // The factors of paths of `depth` >= 1 tokens.
    const float* at_depth(int32_t depth) const { return factors + first_knot(depth); }

    // The chance of a path whose estimates multiply to `product`.
    static float corrected(float product, const float* factors) {
        return std::min(1.0f, product * factor(factors, Place(product)));
    }

    // One path that came true or did not.
    void train(float product, int32_t depth, bool came_true) {
        const Place place(product);
        const int32_t knot = first_knot(depth) + place.knot;
        const float error = (came_true ? 1.0f : 0.0f) - product * factor(at_depth(depth), place);
        move(knot, 1.0f - place.share, product, error);
        move(knot + 1, place.share, product, error);
    }

   private:
    static constexpr float PRIOR = 20.0f;     // paths that came true which a start value counts for
    static constexpr float HORIZON = 100.0f;  // the same, of what is remembered at most

    float weights_[NUM_FACTORS];  // paths that should have come true so far

    // Between two knots, four per octave and linear between powers of two: read off a float's bits.
    struct Place {
        int32_t knot;
        float share;  // of the next knot

        explicit Place(float product) {
            constexpr uint32_t lowest = (127u - OCTAVES) << 23;
            const uint32_t bits = std::max(float_bits(product), lowest) - lowest;
            knot = std::min<int32_t>(bits >> 21, NUM_KNOTS - 2);
            share = std::min(1.0f, static_cast<float>(bits - (static_cast<uint32_t>(knot) << 21)) * (1.0f / (1 << 21)));
        }
    };

    static int32_t first_knot(int32_t depth) {
        constexpr int32_t GROUPS[] = {0, 0, 1, 2, 3, 3, 4, 4, 4, 5};
        return NUM_KNOTS * GROUPS[std::min(depth, 9)];
    }

    static float factor(const float* factors, const Place& place) {
        return factors[place.knot] + place.share * (factors[place.knot + 1] - factors[place.knot]);
    }

    void move(int32_t knot, float share, float product, float error) {
        weights_[knot] = std::min(HORIZON, weights_[knot] + share * product);
        const float moved = factors[knot] + share * error / (weights_[knot] + PRIOR);
        factors[knot] = std::min(MOST_FACTOR, std::max(LEAST_FACTOR, moved));
    }
};

}  // namespace stand
