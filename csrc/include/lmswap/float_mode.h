/// @file
/// @brief The floating-point mode of the calling thread.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace lmswap {

/// @return the control bits on which results depend: denormals as zeros (operands and results), NaN propagation and
/// rounding. Status flags are masked out.
inline uint64_t float_mode() {
#if defined(__x86_64__)
  constexpr unsigned kDenormalsAreZeros = 1U << 6, kRounding = 3U << 13, kFlushToZero = 1U << 15;
  return _mm_getcsr() & (kDenormalsAreZeros | kRounding | kFlushToZero);
#elif defined(__aarch64__)
  // FIZ, AH and NEP; FZ16; rounding, FZ, DN and AHP.
  constexpr uint64_t kChosen = 0x7 | uint64_t{1} << 19 | uint64_t{0x1f} << 22;
  uint64_t mode = 0;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return mode & kChosen;
#else
#error "the floating-point control of this architecture is not known here"
#endif
}

}  // namespace lmswap
