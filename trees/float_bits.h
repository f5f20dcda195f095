// The bits of a float as a number, and back: positive floats compare like them, octaves and their parts can be read off.

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
