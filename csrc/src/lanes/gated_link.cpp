#include "lmswap/lanes/gated_link.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "lmswap/clock.h"
#include "lmswap/error.h"
#include "lmswap/limits.h"
#include "lmswap/tiers/arena.h"

namespace lmswap {

std::unique_ptr<GatedLink> GatedLink::make(const std::shared_ptr<Driver>& driver, const Pacer& pacer) {
  if (!pacer.is_limiting() || !driver->can_wait_for_host()) return nullptr;
  return std::make_unique<GatedLink>(driver, pacer);
}

GatedLink::GatedLink(std::shared_ptr<Driver> driver, Pacer pacer)
    : driver_(std::move(driver)),
      pacer_(std::move(pacer)),
      arrivals_(driver_),
      memory_(driver_, kPageBytes),
      gate_(reinterpret_cast<uint64_t*>(memory_.data())) {
  *gate_ = 0;
  thread_ = start_thread("a thread that stands for a link", ErrorKind::kTier, [this] { run(); });
}

GatedLink::~GatedLink() {
  arrivals_.drain();
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->is_closing = true;
  }
  queue_->changed.notify_all();
  thread_.join();
}

void GatedLink::begin(const Transfer& transfer) {
  transfer.make_wait_ready(arrivals_.handle());
  // Made here, as a callback has nobody to tell that there is no memory left.
  auto arrived = std::make_shared<std::list<Passage>>();
  arrived->push_back({num_begun_ + 1, transfer.block.nbytes, 0, transfer.link_start});
  driver_->call_back(arrivals_.handle(), [queue = queue_, arrived](int) {
    const std::lock_guard lock(queue->mutex);
    arrived->front().ready_seconds = monotonic_seconds();
    queue->passages.splice(queue->passages.end(), *arrived);
    queue->changed.notify_all();
  });
  ++num_begun_;
}

void GatedLink::end(StreamHandle stream) { driver_->wait_value(stream, gate_, num_begun_); }

void GatedLink::run() {
  std::unique_lock lock(queue_->mutex);
  for (;;) {
    queue_->changed.wait(lock, [&] { return queue_->is_closing || !queue_->passages.empty(); });
    if (queue_->passages.empty()) return;
    const Passage passage = std::move(queue_->passages.front());
    queue_->passages.pop_front();
    lock.unlock();
    bring(passage);
    lock.lock();
  }
}

void GatedLink::bring(const Passage& passage) {
  for (uint64_t begin = 0; begin < passage.nbytes; begin += pacer_.chunk_bytes()) {
    const uint64_t nbytes = std::min(pacer_.chunk_bytes(), passage.nbytes - begin);
    passage.start->note(pacer_.pace(nbytes, passage.ready_seconds));
  }
  std::atomic_ref<uint64_t>(*gate_).store(passage.number, std::memory_order_release);
}

}  // namespace lmswap
