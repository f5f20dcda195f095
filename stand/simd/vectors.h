// The instruction sets that a loop is compiled for, and which of them this processor has.

#pragma once

#include <cstdint>
#include <cstdlib>

#define STAND_INLINE inline __attribute__((always_inline))
#if defined(__x86_64__)
#define STAND_AVX2 [[gnu::target("avx2")]]
#ifdef __clang__  // which would leave the whole attribute out
#define STAND_AVX512 [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq")]]
#else
#define STAND_AVX512 [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")]]
#endif
#endif

namespace stand {

enum class Vectors : int32_t { portable, avx2, avx512 };

// The widest instruction set that the processor has; the plainest one where the environment has STAND_PORTABLE.
// Every processor with AVX2 that torch runs on has FMA too, and both are asked for.
inline Vectors widest_vectors() {
#ifdef STAND_AVX2
    if (std::getenv("STAND_PORTABLE") != nullptr) return Vectors::portable;
    const bool is_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (is_wide) return Vectors::avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Vectors::avx2;
#endif
    return Vectors::portable;
}

}  // namespace stand
