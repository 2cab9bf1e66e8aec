#include "stream.h"

#include <chrono>
#include <thread>
#include <utility>

namespace emulated_gpu {

void Stream::submit(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  ++num_submitted_;
  if (!has_thread_) {
    has_thread_ = true;
    std::thread([self = shared_from_this()] { self->run(); }).detach();
  }
  changed_.notify_all();
}

void Stream::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this, last = num_submitted_] { return num_finished_ >= last; });
}

bool Stream::is_idle() {
  const std::lock_guard lock(mutex_);
  return num_finished_ == num_submitted_;
}

void Stream::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

void Stream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return is_closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // what it holds is given back before it counts as finished
    lock.lock();
    ++num_finished_;
    changed_.notify_all();
  }
}

void Event::happen(uint64_t recording) {
  const std::lock_guard lock(mutex_);
  num_happened_ = std::max(num_happened_, recording);
  seconds_ = now();
  changed_.notify_all();
}

void Event::wait(uint64_t recording) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_happened_ >= recording; });
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

}  // namespace emulated_gpu
