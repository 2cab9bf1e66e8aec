/// @file
/// @brief The clock of all times of the runtime.
#pragma once

#include <chrono>

namespace lmswap {

/// @return seconds of CLOCK_MONOTONIC, the clock of Python's time.perf_counter
inline double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace lmswap
