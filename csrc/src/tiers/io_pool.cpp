#include "lmswap/tiers/io_pool.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "lmswap/limits.h"

namespace lmswap {
namespace {

constexpr uint64_t kScratchBytes = 1 << 20;

}  // namespace

IoPool::IoPool(int num_threads)
    : scratch_(
          static_cast<std::byte*>(std::aligned_alloc(kPageBytes, kScratchBytes * static_cast<size_t>(num_threads))),
          std::free) {
  if (!scratch_) throw std::bad_alloc();
  threads_.reserve(static_cast<size_t>(num_threads));
  try {
    for (size_t i = 0; i < static_cast<size_t>(num_threads); ++i) {
      const std::string name = "I/O thread " + std::to_string(i + 1) + " of " + std::to_string(num_threads);
      threads_.push_back(start_thread<TierError>(
          name, [this, i] { run(Scratch(scratch_.get() + i * kScratchBytes, kScratchBytes)); }));
    }
  } catch (...) {
    close();  // destroying a thread that was not joined ends the process
    throw;
  }
}

IoPool::~IoPool() { close(); }

void IoPool::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  explicit_bzero(scratch_.get(),
                 kScratchBytes * threads_.size());  // as in StagedBackend; a memset could be optimized away
}

void IoPool::submit(Job job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  changed_.notify_one();
}

void IoPool::run(Scratch scratch) {
  for (;;) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_closing_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job(scratch);
  }
}

}  // namespace lmswap
