#include "stream.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace emulated_gpu {

void Stream::submit(Work work) {
  const std::lock_guard lock(mutex_);
  queue_.emplace_back(std::move(work), now());
  ++num_submitted_;
  if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->run(); });
  changed_.notify_all();
}

void Stream::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this, last = num_submitted_] { return num_finished_ >= last; });
}

void Stream::wait_for_room(size_t max_queued) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_submitted_ - num_finished_ <= max_queued; });
}

bool Stream::is_idle() {
  const std::lock_guard lock(mutex_);
  return num_finished_ == num_submitted_;
}

void Stream::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
  }
  if (!thread_.joinable()) return;
  if (is_idle()) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void Stream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return is_closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    auto [work, submitted] = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    seconds_ = work(std::max(seconds_, submitted));
    work = nullptr;  // what it holds is given back before it counts as finished
    lock.lock();
    ++num_finished_;
    changed_.notify_all();
  }
}

double Turns::wait(uint64_t turn) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_ended_ == turn; });
  return seconds_;
}

void Turns::end(double seconds) {
  const std::lock_guard lock(mutex_);
  ++num_ended_;
  seconds_ = seconds;
  changed_.notify_all();
}

void Event::happen(uint64_t recording, double seconds) {
  const std::lock_guard lock(mutex_);
  num_happened_ = std::max(num_happened_, recording);
  seconds_ = std::max(seconds_, seconds);
  changed_.notify_all();
}

double Event::wait(uint64_t recording) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_happened_ >= recording; });
  return seconds_;
}

bool Event::has_happened(uint64_t recording) {
  const std::lock_guard lock(mutex_);
  return num_happened_ >= recording;
}

double Event::seconds() {
  const std::lock_guard lock(mutex_);
  return seconds_;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void sleep_until(double seconds) {
  const double left = seconds - now();
  if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
}

}  // namespace emulated_gpu
