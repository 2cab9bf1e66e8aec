#include "lmswap/lanes/lane.h"

#include <exception>
#include <utility>

#include "lmswap/error.h"
#include "lmswap/limits.h"

namespace lmswap {

Lane::Lane(std::unique_ptr<TransferBackend> backend, bool has_thread)
    : backend_(std::move(backend)), has_thread_(has_thread) {
  if (has_thread_) thread_ = start_thread<TierError>("a thread that moves swapped bytes", [this] { run(); });
}

Lane::~Lane() {
  backend_->end();
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  if (has_thread_) thread_.join();
  backend_->drain();
}

void Lane::submit(TransferPointer transfer) {
  {
    const std::lock_guard lock(mutex_);
    if (!has_thread_) return start(transfer);
    queue_.push_back(transfer);
    changed_.notify_all();
  }
  backend_->issue(
      transfer);  // not under the lock: a device whose queue is full blocks until the lane's thread has continued
}

void Lane::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return is_closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    TransferPointer transfer = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    start(transfer);
    transfer.reset();  // not under the lock: the last owner of a slab frees it
    lock.lock();
  }
}

// Everything that it waits for was queued before it, so lanes cannot deadlock.
void Lane::start(const TransferPointer& transfer) noexcept {
  try {
    for (const TransferPointer& dependency : transfer->dependencies) dependency->state.wait_landed();
    if (transfer->source && !transfer->source->state.wait_landed()) {
      throw TransferError("the bytes never reached the tier: " + transfer->source->state.error_text());
    }
    backend_->move(transfer);
  } catch (const std::exception& error) {
    transfer->state.fail(error);
    backend_->abort(transfer);
  }
  // Dropped, or the chain of previous holders would grow for as long as the block is in use.
  transfer->source.reset();
  transfer->dependencies.clear();
  if (transfer->state.finish_part()) backend_->complete(transfer);
}

}  // namespace lmswap
