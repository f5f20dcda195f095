// The exponential function of numbers that are not above zero, made for loops that the compiler turns into vectors.

#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace stand {

constexpr float LARGEST_DISTANCE = 87.0f;  // exp(-distance) is a normal number up to here, and taken as 0 beyond

// The value, or 0: without a branch, so that compilers make vectors of loops around it.
STAND_INLINE float value_if(bool is_kept, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits &= -static_cast<uint32_t>(is_kept);
    std::memcpy(&value, &bits, sizeof bits);
    return value;
}

// exp(-distance) for distance >= 0: 2^whole * exp(rest) with |rest| <= ln(2) / 2, coefficients of Cephes' expf.
// Within 2e-7 of the true value; exactly 1 at 0.
STAND_INLINE float exponential(float distance) {
    const float rounder = 12582912.0f;  // 1.5 * 2^23: added, it leaves the nearest integer in the low bits
    const float shifted = distance * -1.44269504088896341f + rounder;
    const float whole = shifted - rounder;
    const float rest = -distance - whole * 0.693359375f + whole * 2.12194440e-4f;
    float series = 1.9875691500e-4f;
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127u) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return value_if(distance <= LARGEST_DISTANCE, series * power);
}

}  // namespace stand
