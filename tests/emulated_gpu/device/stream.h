// How does queued work run? A stream is a queue with a thread of its own; an event is a place in a stream.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "vector_clock.h"

namespace emulated_gpu {

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(uint32_t number, int device) : number(number), device(device) {}

  void submit(std::function<void()> work);
  void wait();  // for what is queued now
  bool is_idle();
  void close();  // the thread ends when it has done what is queued

  const uint32_t number;
  const int device;
  VectorClock clock;  // from the calls, under the system's lock

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t num_submitted_ = 0, num_finished_ = 0;
  bool has_thread_ = false, is_closed_ = false;
};

class Event {
 public:
  Event(bool has_time, int device) : has_time(has_time), device(device) {}

  void happen(uint64_t recording);
  void wait(uint64_t recording);
  bool has_happened(uint64_t recording);
  double seconds();  // when it happened last

  const bool has_time;
  const int device;
  VectorClock clock;  // these two from the calls, under the system's lock
  uint64_t num_recorded = 0;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t num_happened_ = 0;
  double seconds_ = 0;
};

double now();  // seconds of CLOCK_MONOTONIC

}  // namespace emulated_gpu
