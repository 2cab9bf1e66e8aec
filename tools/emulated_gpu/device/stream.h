// Execution of queued work: a stream is a queue with a thread of its own; an event is a place in a stream.
//
// Streams keep the device's time: what is queued begins when what it waits for has ended there, not when a thread has
// woken up for it. A thread that is late, as the host's cores have others to serve, catches up; a kernel that a core
// works at for longer than the device would takes that long.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "vector_clock.h"

namespace emulated_gpu {

// Called with the time of its start on the device; returns that of its end, which is no earlier.
using Work = std::function<double(double begin)>;

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(uint32_t number, int device) : number(number), device(device) {}

  void submit(Work work);
  void wait_for_room(size_t max_queued);
  void wait();  // for what is queued now
  bool is_idle();
  void close();  // the thread has ended then, or, where work is queued, ends when that is done

  const uint32_t number;
  const int device;
  VectorClock clock;  // from the calls, under the system's lock

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<Work, double>> queue_;  // and when it was submitted
  double seconds_ = 0;                         // when the last of its work ended
  uint64_t num_submitted_ = 0, num_finished_ = 0;
  bool is_closed_ = false;
  std::thread thread_;
};

// Of all streams of one queue: each waits for its turn.
class Turns {
 public:
  uint64_t take() { return num_taken_++; }  // under the system's lock
  double wait(uint64_t turn);               // when the one before ended
  void end(double seconds);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t num_taken_ = 0, num_ended_ = 0;
  double seconds_ = 0;
};

class Event {
 public:
  Event(bool has_time, int device) : has_time(has_time), device(device) {}

  void happen(uint64_t recording, double seconds);
  double wait(uint64_t recording);  // when it happened last
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
void sleep_until(double seconds);

}  // namespace emulated_gpu
