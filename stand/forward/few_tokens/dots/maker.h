// Who has made the processor.

#pragma once

namespace stand {

namespace dots {

// Whether it is of the maker of MKL, whose products are fast on its own.
inline bool is_intel() {
#if defined(__x86_64__)
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}

}  // namespace dots

}  // namespace stand
