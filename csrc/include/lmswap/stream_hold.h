// Makes a stream wait for the host, for a limited time, so that what is queued behind it runs without gaps.
//
// The stream waits for a value in pinned memory. A callback that blocks would not do: while one of cuStreamAddCallback
// runs, the driver's lock is held, and nobody can queue anything (CUDA 13.0, driver 580).
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

class StreamHold {
 public:
  // The driver must be able to wait for the host.
  explicit StreamHold(std::shared_ptr<Driver> driver);
  ~StreamHold();  // ends the hold, and waits until the stream has passed it

  // `stream` waits with what is queued after this until `end`, or for `most_seconds`. A hold in force ends.
  void begin(StreamHandle stream, double most_seconds);
  void end();

 private:
  using Clock = std::chrono::steady_clock;

  void run();   // the thread that ends holds whose time is over; it calls nothing of the driver's
  void open();  // under the lock

  const std::shared_ptr<Driver> driver_;
  PinnedMemory memory_;   // a page for the gate
  uint64_t* const gate_;  // the number of the last hold that has ended
  Event passed_;          // of the last hold
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t num_begun_ = 0;
  bool is_held_ = false, is_closing_ = false;
  Clock::time_point limit_;
  std::thread thread_;
};

}  // namespace lmswap
