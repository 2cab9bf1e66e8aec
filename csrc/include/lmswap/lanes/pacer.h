// Holds a lane to a number of bytes per second, to stand in for a slower link.
//
// The emulated link is one number: when it is free again. A lane takes the link for one chunk at a time, from when the
// link is free and the bytes are there, and sleeps until the chunk would have arrived. Nothing arrives before such a
// link would have brought it; what a thread slept too long is made up for by the next chunk. Lanes of several processes
// may share the number (see shared_link.h): their chunks then take turns.
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

using FreeAt = std::atomic<int64_t>;  // nanoseconds of CLOCK_MONOTONIC

class Pacer {
 public:
  // 0: no limit. Copies share the link.
  explicit Pacer(double bytes_per_second = 0, std::shared_ptr<FreeAt> free_at = std::make_shared<FreeAt>(0))
      : bytes_per_second_(bytes_per_second), free_at_(std::move(free_at)) {}

  bool is_limiting() const { return bytes_per_second_ > 0; }

  // What is copied at once. A sleep is late by 0.08 ms in the median, so a chunk lasts four times that; less than 1 MiB
  // would only cost calls.
  uint64_t chunk_bytes() const {
    constexpr uint64_t kLeastBytes = 1 << 20;
    constexpr double kSeconds = 0.34e-3;
    return std::max(kLeastBytes, static_cast<uint64_t>(bytes_per_second_ * kSeconds) / kLeastBytes * kLeastBytes);
  }

  // Sleeps until the link has moved nbytes more, which were there to be moved at `ready_seconds`. Says since when it
  // has.
  double pace(uint64_t nbytes, double ready_seconds) {
    const int64_t now = nanoseconds(monotonic_seconds());
    const int64_t end = take(nbytes, nanoseconds(ready_seconds), now);
    if (end > now) std::this_thread::sleep_for(std::chrono::nanoseconds(end - now));
    return static_cast<double>(end - duration_of(nbytes)) * 1e-9;
  }

  // Takes the link at the time `now`; returns when the bytes will have arrived.
  int64_t take(uint64_t nbytes, int64_t ready, int64_t now) {
    const int64_t duration = duration_of(nbytes);
    int64_t free_at = free_at_->load();
    for (;;) {
      // So many chunks are never queued: the number was left by another boot of the machine, or it is damaged.
      const bool is_stale = free_at > now + kMostQueuedChunks * duration_of(std::max(chunk_bytes(), kLargestRequest));
      // A link that was busy when the bytes came goes on without a pause; an idle one starts now.
      const bool goes_on = !is_stale && free_at >= ready;
      const int64_t end = (goes_on ? std::max(free_at, now - kMostCatchUp) : now) + duration;
      if (free_at_->compare_exchange_weak(free_at, end)) return end;
    }
  }

 private:
  static constexpr int64_t kMostQueuedChunks = 64;      // lanes that share a link, one chunk each
  static constexpr uint64_t kLargestRequest = 4 << 20;  // of the disk's lanes
  static constexpr int64_t kMostCatchUp = 20'000'000;   // threads that sleep too long on a busy machine: 20 ms

  static int64_t nanoseconds(double seconds) { return static_cast<int64_t>(seconds * 1e9); }
  int64_t duration_of(uint64_t nbytes) const { return nanoseconds(static_cast<double>(nbytes) / bytes_per_second_); }

  double bytes_per_second_;
  std::shared_ptr<FreeAt> free_at_;
};

// An emulated link, each way.
struct Pacers {
  Pacer out = Pacer(), in = Pacer();
  bool is_limiting() const { return out.is_limiting() || in.is_limiting(); }
};

}  // namespace lmswap
