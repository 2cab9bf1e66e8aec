#include "lmswap/lanes/gated_link.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "lmswap/clock.h"
#include "lmswap/error.h"
#include "lmswap/limits.h"
#include "lmswap/tiers/arena.h"

namespace lmswap {

std::unique_ptr<GatedLink> GatedLink::make(const std::shared_ptr<Driver>& driver, const BandwidthLimiter& limiter) {
  if (!limiter.is_limiting() || !driver->can_wait_for_host()) return nullptr;
  return std::make_unique<GatedLink>(driver, limiter);
}

GatedLink::GatedLink(std::shared_ptr<Driver> driver, BandwidthLimiter limiter)
    : driver_(std::move(driver)),
      limiter_(std::move(limiter)),
      arrivals_(driver_),
      memory_(driver_, kPageBytes),
      gate_(reinterpret_cast<uint64_t*>(memory_.data())) {
  *gate_ = 0;
  thread_ = start_thread<TierError>("a thread that stands for a link", [this] { run(); });
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
  transfer.queue_wait_ready(arrivals_.handle());
  // Allocated here, since a callback could not report that allocating it failed.
  auto arrived = std::make_shared<std::list<Request>>();
  arrived->push_back({num_begun_ + 1, transfer.block.nbytes, 0, transfer.link_start});
  driver_->call_back(arrivals_.handle(), [queue = queue_, arrived](int) {
    const std::lock_guard lock(queue->mutex);
    arrived->front().ready_seconds = monotonic_seconds();
    queue->requests.splice(queue->requests.end(), *arrived);
    queue->changed.notify_all();
  });
  ++num_begun_;
}

void GatedLink::end(StreamHandle stream) { driver_->wait_value(stream, gate_, num_begun_); }

void GatedLink::run() {
  std::unique_lock lock(queue_->mutex);
  for (;;) {
    queue_->changed.wait(lock, [&] { return queue_->is_closing || !queue_->requests.empty(); });
    if (queue_->requests.empty()) return;
    const Request request = std::move(queue_->requests.front());
    queue_->requests.pop_front();
    lock.unlock();
    serve(request);
    lock.lock();
  }
}

void GatedLink::serve(const Request& request) {
  for (uint64_t begin = 0; begin < request.nbytes; begin += limiter_.chunk_bytes()) {
    const uint64_t nbytes = std::min(limiter_.chunk_bytes(), request.nbytes - begin);
    request.start->record(limiter_.throttle(nbytes, request.ready_seconds));
  }
  std::atomic_ref<uint64_t>(*gate_).store(request.number, std::memory_order_release);
}

}  // namespace lmswap
