/// @file
/// @brief Limits the number of concurrent requests.
#pragma once

#include <condition_variable>
#include <mutex>

namespace lmswap {

/// @brief A counting semaphore that can wait for all requests. Thread-safe.
class RequestLimiter {
 public:
  /// @param max_requests the most that may run concurrently
  explicit RequestLimiter(int max_requests) : max_requests_(max_requests) {}

  /// @brief Blocks until fewer than `max_requests` run, and begins one.
  void acquire() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_requests_ < max_requests_; });
    ++num_requests_;
  }

  /// @brief Ends a request, on any thread.
  void release() {
    const std::lock_guard lock(mutex_);
    --num_requests_;
    changed_.notify_all();
  }

  /// @brief Blocks until no request runs.
  void wait_until_idle() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_requests_ == 0; });
  }

 private:
  const int max_requests_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_requests_ = 0;
};

}  // namespace lmswap
