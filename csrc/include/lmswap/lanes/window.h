// Bounds how many requests are under way, and waits for the last of them.
#pragma once

#include <condition_variable>
#include <mutex>

namespace lmswap {

class Window {
 public:
  explicit Window(int size) : size_(size) {}

  void enter() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_inside_ < size_; });
    ++num_inside_;
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    --num_inside_;
    changed_.notify_all();
  }

  void wait_until_empty() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_inside_ == 0; });
  }

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_inside_ = 0;
};

}  // namespace lmswap
