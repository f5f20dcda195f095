// Passes over one block of 512 scores: loops of fixed length that the compiler turns into vectors, compiled once for
// every instruction set. Sums are folded in one order, so all of them give equal bits.

#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "../simd/exponential.h"
#include "../simd/vectors.h"

namespace stand {

constexpr int32_t BLOCK = 512;
constexpr int32_t LANES = 16;
constexpr int32_t CELL = BLOCK / LANES;  // tokens of a block that are a multiple of LANES apart
constexpr int32_t LAST_BUCKET = 2047;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Maximum {
    static STAND_INLINE float join(float a, float b) { return a > b ? a : b; }
};

struct Sum {
    static STAND_INLINE float join(float a, float b) { return a + b; }
};

// Joins the upper half to the lower one until END values are left.
template <class Operation, int32_t SIZE, int32_t END>
STAND_INLINE void fold(const float* values, float* folded) {
    for (int32_t i = 0; i < SIZE / 2; ++i) folded[i] = Operation::join(values[i], values[i + SIZE / 2]);
    if constexpr (SIZE / 2 > END) fold<Operation, SIZE / 2, END>(folded, folded);
}

STAND_INLINE float sum_of_block(const float* values) {
    float folded[BLOCK / 2];
    fold<Sum, BLOCK, 1>(values, folded);
    return folded[0];
}

// The largest of every cell, divided by the temperature.
struct Scan {
    const float* scores;
    float temperature;
    float* cells;
    int32_t has_nan = 0;

    STAND_INLINE void run() {
        int32_t found = 0;
        for (int32_t i = 0; i < BLOCK; ++i) found |= scores[i] != scores[i];
        has_nan |= found;
        float folded[BLOCK / 2];
        fold<Maximum, BLOCK, LANES>(scores, folded);
        for (int32_t lane = 0; lane < LANES; ++lane) cells[lane] = folded[lane] / temperature;
    }
};

// What a block's tokens weigh against the best one: exp(score / temperature - best), 0 below the cut or the floor.
struct Weigh {
    float temperature, best, cut, floor;
    const float* scores;
    float* weights;
    float sum = 0.0f;

    STAND_INLINE void run() {
        for (int32_t i = 0; i < BLOCK; ++i) {
            const float score = scores[i] / temperature;
            const float weight = exponential(best - score);
            weights[i] = value_if((score >= cut) & (weight >= floor), weight);
        }
        sum = sum_of_block(weights);
    }
};

// The bucket of every token of a block: by distance from the best one, so never against the order of scores. The last
// bucket is for all that are too far; they are summed here.
struct FindBuckets {
    float temperature, best, buckets_per_unit;
    const float* scores;
    const float* weights;
    uint16_t* buckets;
    int32_t num_far = 0;
    float far_sum = 0.0f;

    STAND_INLINE void run() {
        float far[BLOCK];
        int32_t count = 0;
        for (int32_t i = 0; i < BLOCK; ++i) {
            const float place = (best - scores[i] / temperature) * buckets_per_unit;
            const bool is_far = place >= LAST_BUCKET;
            buckets[i] = static_cast<uint16_t>(static_cast<int32_t>(is_far ? LAST_BUCKET : place));
            far[i] = value_if(is_far, weights[i]);
            count += is_far;
        }
        num_far = count;
        far_sum = sum_of_block(far);
    }
};

// The tokens of a block that lie in one bucket.
struct Collect {
    const uint16_t* buckets;
    uint16_t wanted;
    int32_t first;
    std::vector<int32_t>& tokens;

    STAND_INLINE void run() {
        for (int32_t start = 0; start < BLOCK; start += CELL) {
            uint16_t found = 0;
            for (int32_t i = start; i < start + CELL; ++i) found |= buckets[i] == wanted;
            if (!found) continue;
            for (int32_t i = start; i < start + CELL; ++i)
                if (buckets[i] == wanted) tokens.push_back(first + i);
        }
    }
};

// Leaves weights in better buckets than the border that are not below the floor.
struct Clear {
    uint16_t border;
    float floor;
    const uint16_t* buckets;
    float* weights;
    float sum = 0.0f;

    STAND_INLINE void run() {
        for (int32_t i = 0; i < BLOCK; ++i)
            weights[i] = value_if((buckets[i] < border) & (weights[i] >= floor), weights[i]);
        sum = sum_of_block(weights);
    }
};

// Weights to probabilities.
struct Scale {
    const float* weights;
    float factor;
    int64_t size;
    float* law;

    STAND_INLINE void run() {
        for (int64_t i = 0; i < size; ++i) law[i] = weights[i] * factor;
    }
};

#ifdef STAND_AVX2
template <class Pass>
STAND_AVX2 void run_avx2(Pass& pass) {
    pass.run();
}

template <class Pass>
STAND_AVX512 void run_avx512(Pass& pass) {
    pass.run();
}
#endif

template <class Pass>
void run_with(Vectors vectors, Pass& pass) {
#ifdef STAND_AVX2
    if (vectors == Vectors::avx512) return run_avx512(pass);
    if (vectors == Vectors::avx2) return run_avx2(pass);
#endif
    pass.run();
}

}  // namespace stand
