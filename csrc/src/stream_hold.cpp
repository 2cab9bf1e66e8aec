#include "lmswap/stream_hold.h"

#include <atomic>
#include <utility>

#include "lmswap/error.h"
#include "lmswap/limits.h"
#include "lmswap/tiers/arena.h"

namespace lmswap {

StreamHold::StreamHold(std::shared_ptr<Driver> driver)
    : driver_(std::move(driver)),
      memory_(driver_, kPageBytes),
      gate_(reinterpret_cast<uint64_t*>(memory_.data())),
      passed_(driver_) {
  *gate_ = 0;
  thread_ = start_thread<DriverError>("a thread that ends holds of a stream", [this] { run(); });
}

StreamHold::~StreamHold() {
  end();
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
  if (num_begun_ > 0) passed_.synchronize();
}

void StreamHold::begin(StreamHandle stream, double max_seconds) {
  uint64_t number;
  {
    const std::lock_guard lock(mutex_);
    open();
    number = ++num_begun_;
    is_held_ = true;
    limit_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(max_seconds));
  }
  changed_.notify_all();
  driver_->wait_value(stream, gate_, number);
  passed_.record(stream);
}

void StreamHold::end() {
  const std::lock_guard lock(mutex_);
  open();
}

void StreamHold::open() {
  std::atomic_ref<uint64_t>(*gate_).store(num_begun_, std::memory_order_release);
  is_held_ = false;
}

void StreamHold::run() {
  std::unique_lock lock(mutex_);
  while (!is_closing_) {
    if (!is_held_) {
      changed_.wait(lock);
    } else if (Clock::now() >= limit_) {
      open();
    } else {
      changed_.wait_until(lock, limit_);
    }
  }
}

}  // namespace lmswap
