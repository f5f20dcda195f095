// The bits of a float as a number: positive floats compare like them, octaves and their parts are read off them.

#pragma once

#include <cstdint>
#include <cstring>

namespace stand {

inline uint32_t float_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

}  // namespace stand
