// Holds a lane to a number of bytes per second, to stand in for a slower link.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

#include "lmswap/clock.h"

namespace lmswap {

class Pacer {
 public:
  explicit Pacer(double bytes_per_second) : bytes_per_second_(bytes_per_second) {}  // 0: no limit

  bool is_limiting() const { return bytes_per_second_ > 0; }

  // Sleeps until a link of this speed, free since the last call's end, would have moved nbytes more.
  void pace(uint64_t nbytes) {
    if (!is_limiting()) return;
    const double now = monotonic_seconds();
    free_at_ = std::max(free_at_, now - overslept_) + static_cast<double>(nbytes) / bytes_per_second_;
    overslept_ = 0;
    if (free_at_ <= now) return;
    std::this_thread::sleep_for(std::chrono::duration<double>(free_at_ - now));
    overslept_ = monotonic_seconds() - free_at_;
  }

 private:
  double bytes_per_second_;
  double free_at_ = 0;
  double overslept_ = 0;  // what the last sleep was too long by; the next call makes up for it
};

}  // namespace lmswap
