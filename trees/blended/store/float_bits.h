// The bits of a float as a number, and back. Positive floats compare like their bits, which also give octaves.

#pragma once

#include <cstdint>
#include <cstring>

namespace stand {

inline uint32_t float_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace stand
