/// @file
/// @brief Limits a lane to a number of bytes per second, which emulates a slower link.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "lmswap/clock.h"

namespace lmswap {

using FreeAt = std::atomic<int64_t>;  ///< nanoseconds of CLOCK_MONOTONIC

/// @brief An emulated link in one direction. Thread-safe; copies share the link.
///
/// The state of the link is one number: when it is next free. A lane reserves the link for one chunk at a time, from
/// when the link is free and the bytes are available, and sleeps until the chunk would have arrived. Nothing arrives
/// earlier than on such a link; time lost by oversleeping is recovered by the next chunk. Lanes of several processes
/// may share the number (see shared_link.h); their chunks then take turns.
class BandwidthLimiter {
 public:
  /// @param bytes_per_second bandwidth; 0: no limit
  /// @param free_at state of the link
  explicit BandwidthLimiter(double bytes_per_second = 0, std::shared_ptr<FreeAt> free_at = std::make_shared<FreeAt>(0))
      : bytes_per_second_(bytes_per_second), free_at_(std::move(free_at)) {}

  [[nodiscard]] bool is_limiting() const { return bytes_per_second_ > 0; }

  /// @return how many bytes to copy at a time
  ///
  /// A sleep is late by 0.08 ms in the median, so a chunk lasts four times that; less than 1 MiB would only add calls.
  [[nodiscard]] uint64_t chunk_bytes() const {
    constexpr uint64_t kLeastBytes = 1 << 20;
    constexpr double kSeconds = 0.34e-3;
    return std::max(kLeastBytes, static_cast<uint64_t>(bytes_per_second_ * kSeconds) / kLeastBytes * kLeastBytes);
  }

  /// @brief Sleeps until the link has moved `nbytes` more.
  /// @param ready_seconds since when the bytes are available
  /// @return when the link began to move them
  double throttle(uint64_t nbytes, double ready_seconds) {
    const int64_t now = nanoseconds(monotonic_seconds());
    const int64_t end = take(nbytes, nanoseconds(ready_seconds), now);
    if (end > now) std::this_thread::sleep_for(std::chrono::nanoseconds(end - now));
    return static_cast<double>(end - duration_of(nbytes)) * 1e-9;
  }

  /// @brief Reserves the link for `nbytes`. Times are nanoseconds.
  /// @param ready since when the bytes are available
  /// @param now current time
  /// @return when the bytes will have arrived
  int64_t take(uint64_t nbytes, int64_t ready, int64_t now) {
    const int64_t duration = duration_of(nbytes);
    int64_t free_at = free_at_->load();
    for (;;) {
      // So many chunks are never queued: the number is from before a reboot, or corrupt.
      const bool is_stale = free_at > now + kMaxQueuedChunks * duration_of(std::max(chunk_bytes(), kLargestRequest));
      // A link that was busy when the bytes became available continues without a gap; an idle one starts now.
      const bool is_continued = !is_stale && free_at >= ready;
      const int64_t end = (is_continued ? std::max(free_at, now - kMaxCatchUp) : now) + duration;
      if (free_at_->compare_exchange_weak(free_at, end)) return end;
    }
  }

 private:
  static constexpr int64_t kMaxQueuedChunks = 64;       // lanes that share a link, one chunk each
  static constexpr uint64_t kLargestRequest = 4 << 20;  // of the disk's lanes
  static constexpr int64_t kMaxCatchUp = 20'000'000;    // oversleeping on a busy machine: 20 ms

  static int64_t nanoseconds(double seconds) { return static_cast<int64_t>(seconds * 1e9); }
  [[nodiscard]] int64_t duration_of(uint64_t nbytes) const {
    return nanoseconds(static_cast<double>(nbytes) / bytes_per_second_);
  }

  double bytes_per_second_;
  std::shared_ptr<FreeAt> free_at_;
};

/// @brief An emulated link in both directions.
struct BandwidthLimiters {
  BandwidthLimiter out = BandwidthLimiter(), in = BandwidthLimiter();
  [[nodiscard]] bool is_limiting() const { return out.is_limiting() || in.is_limiting(); }
};

}  // namespace lmswap
