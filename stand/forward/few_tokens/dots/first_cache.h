// How much a processor's own first cache holds.

#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace stand {

// Bytes of a core's first cache for data, less what else is in use; of the smallest one in use where nobody says.
inline int64_t first_cache() {
    constexpr int64_t LEAST = 32 << 10, OTHERS = 2 << 10;
#ifdef _SC_LEVEL1_DCACHE_SIZE
    static const int64_t told = sysconf(_SC_LEVEL1_DCACHE_SIZE);
#else
    constexpr int64_t told = 0;
#endif
    return std::max(told, LEAST) - OTHERS;
}

}  // namespace stand
