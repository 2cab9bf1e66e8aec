#include "lmswap/lanes/lane.h"

#include <exception>
#include <utility>

#include "lmswap/error.h"
#include "lmswap/limits.h"

namespace lmswap {

Lane::Lane(std::unique_ptr<Mover> mover, bool has_thread) : mover_(std::move(mover)), has_thread_(has_thread) {
  if (has_thread_) thread_ = start_thread("a thread that moves swapped bytes", ErrorKind::kTier, [this] { run(); });
}

Lane::~Lane() {
  mover_->end();
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  if (has_thread_) thread_.join();
  mover_->drain();
}

void Lane::submit(TransferPointer transfer) {
  {
    const std::lock_guard lock(mutex_);
    if (!has_thread_) return start(transfer);
    queue_.push_back(transfer);
    changed_.notify_all();
  }
  mover_->issue(transfer);  // not under the lock: a device that is full blocks until the thread has gone on
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
    transfer.reset();  // not under the lock: the last owner of a slab gives that back
    lock.lock();
  }
}

// What it waits for was queued before it, so lanes never wait for each other in a circle.
void Lane::start(const TransferPointer& transfer) noexcept {
  try {
    for (const TransferPointer& fence : transfer->fences) fence->wait_landed();
    if (transfer->source && !transfer->source->wait_landed()) {
      throw Error(ErrorKind::kTransfer, "the bytes never reached the tier: " + transfer->source->error_text());
    }
    mover_->move(transfer);
  } catch (const std::exception& error) {
    transfer->fail(error);
    mover_->give_up(transfer);
  }
  // The chain of past holders must not grow for as long as the block is in use.
  transfer->source.reset();
  transfer->fences.clear();
  if (transfer->finish_part()) mover_->complete(transfer);
}

}  // namespace lmswap
