// Numbers of sixteen bits with a float's range.

#pragma once

#include <cstdint>
#include <cstring>

namespace stand {

// The upper half of a float's bits.
struct Bfloat16 {
    uint16_t bits;
};

// What arithmetic takes of a number.
inline float widened(float value) { return value; }

inline float widened(Bfloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void narrow(float value, float& result) { result = value; }

// To the nearest one, of two as near to the even one; NaN stays.
inline void narrow(float value, Bfloat16& result) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    result.bits = is_nan ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

}  // namespace stand
