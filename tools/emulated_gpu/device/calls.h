// Counts the calls of each function, between start and stop.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace emulated_gpu {

class Calls {
 public:
  // From now on, from 0 on.
  void start() {
    const std::lock_guard lock(mutex_);
    numbers_.clear();
    is_counting_ = true;
  }

  void add(const char* symbol) {
    if (!is_counting_) return;
    const std::lock_guard lock(mutex_);
    ++numbers_[symbol];
  }

  // By symbol, since the start.
  std::map<std::string, uint64_t> numbers() {
    const std::lock_guard lock(mutex_);
    return numbers_;
  }

  // The same, and no more from now on.
  std::map<std::string, uint64_t> stop() {
    const std::lock_guard lock(mutex_);
    is_counting_ = false;
    return std::exchange(numbers_, {});
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> is_counting_{false};
  std::map<std::string, uint64_t> numbers_;
};

}  // namespace emulated_gpu
