// Included last: what Cython writes around the C++ above it is compiled for size, as compact modules are (setup.py).
#pragma once

#if defined(__GNUC__) && !defined(__clang__) && !defined(STAND_DEBUG)
#pragma GCC optimize("Os")
#endif
