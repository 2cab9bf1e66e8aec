// CLOCK_MONOTONIC in seconds: the clock of Python's time.perf_counter, in which all times of the runtime are given.
#pragma once

#include <chrono>

namespace lmswap {

inline double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace lmswap
