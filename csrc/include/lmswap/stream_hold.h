/// @file
/// @brief A stream that waits for the host for a limited time, so that what is queued behind the wait runs without
/// gaps.
///
/// The stream waits for a value in pinned memory. A blocking callback would not do: while one of cuStreamAddCallback
/// runs, the driver's lock is held, and no thread can queue anything (CUDA 13.0, driver 580).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "lmswap/driver/event.h"
#include "lmswap/tiers/storage.h"

namespace lmswap {

/// @brief Holds one stream at a time. `end` is thread-safe; callers serialize `begin`.
class StreamHold {
 public:
  /// @param driver one that can wait for the host
  /// @throws DriverError if pinned memory, an event or the thread cannot be created
  explicit StreamHold(std::shared_ptr<Driver> driver);

  /// @brief Ends the hold and blocks until the stream has passed it.
  ~StreamHold();

  /// @brief Makes `stream` wait, before what is queued from now on, until `end` or for `max_seconds`.
  ///
  /// Ends the hold that is in force.
  /// @throws DriverError if the wait cannot be queued
  void begin(StreamHandle stream, double max_seconds);

  /// @brief Ends the hold in force, if there is one.
  void end();

 private:
  using Clock = std::chrono::steady_clock;

  void run();   // the thread that ends expired holds; it makes no driver calls
  void open();  // requires mutex_

  const std::shared_ptr<Driver> driver_;
  PinnedMemory memory_;   // one page, for the gate
  uint64_t* const gate_;  // number of the last hold that has ended
  Event passed_;          // recorded behind the wait of the last hold
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t num_begun_ = 0;
  bool is_held_ = false, is_closing_ = false;
  Clock::time_point limit_;
  std::thread thread_;
};

}  // namespace lmswap
