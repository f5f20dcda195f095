// Adding up many numbers in float64.

#pragma once

#include <cstddef>

#if defined(__GNUC__) && !defined(__clang__)
#define STAND_FAST __attribute__((optimize("O3")))  // in a module that is compiled for its size, this loop is not
#else
#define STAND_FAST
#endif

namespace stand {

// In four parts, so that no addition waits for the one before.
template <typename Number>
STAND_FAST double sum(const Number* numbers, std::ptrdiff_t count) {
    double parts[4] = {0.0, 0.0, 0.0, 0.0};
    std::ptrdiff_t place = 0;
    for (; place + 4 <= count; place += 4)
        for (int part = 0; part < 4; ++part) parts[part] += numbers[place + part];
    for (; place < count; ++place) parts[0] += numbers[place];
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

}  // namespace stand
