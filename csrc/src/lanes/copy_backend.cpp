#include "lmswap/lanes/copy_backend.h"

#include <algorithm>
#include <utility>

#include "lmswap/error.h"

namespace lmswap {
namespace {

// The program's own copies in the same direction, of an input or for `.item()`, are served by the copy engine between
// two chunks: on PCIe gen5 after half a millisecond at most, where a copy of 1 GiB takes 19.
constexpr uint64_t kChunkBytes = uint64_t{32} << 20;

}  // namespace

CopyBackend::CopyBackend(std::shared_ptr<Driver> driver, BandwidthLimiter limiter)
    : driver_(std::move(driver)),
      stream_(driver_),
      link_(GatedLink::make(driver_, limiter)),
      limiter_(link_ ? BandwidthLimiter() : std::move(limiter)) {}

void CopyBackend::move(const TransferPointer& transfer) {
  // `ready` protects the device memory: of a copy out, what the caller's stream writes into it; of a copy in, what
  // kernels queued there still read for the memory's previous owner.
  transfer->ready.make_wait(stream_.handle());
  // The source's `done` protects the tier's bytes that this copy reads: they may not have arrived yet.
  if (transfer->source && !transfer->is_ordered_after_source) wait_behind(*transfer, transfer->source->state.done);
  // The dependencies' `done` protect the tier's bytes that this copy overwrites: their last holder's copy may still
  // read them.
  for (const TransferPointer& dependency : transfer->dependencies) {
    if (!dependency->state.has_failed()) wait_behind(*transfer, dependency->state.done);
  }
  if (link_) link_->begin(*transfer);
  // An emulated link starts when the bytes are available, not when the copy is queued; a lane's thread may block.
  const double ready_seconds = limiter_.is_limiting() ? transfer->wait_ready() : 0;
  if (last_done_) transfer->add_predecessor(last_done_);
  const uint64_t chunk_bytes = limiter_.is_limiting() ? limiter_.chunk_bytes() : kChunkBytes;
  for (uint64_t begin = 0; begin < transfer->block.nbytes; begin += chunk_bytes) {
    const uint64_t nbytes = std::min(chunk_bytes, transfer->block.nbytes - begin);
    copy(*transfer, begin, nbytes);
    if (limiter_.is_limiting()) transfer->link_start->record(limiter_.throttle(nbytes, ready_seconds));
  }
  if (link_) link_->end(stream_.handle());
  transfer->state.done->record(stream_.handle());
  last_done_ = transfer->state.done;
}

void CopyBackend::wait_behind(Transfer& transfer, const std::shared_ptr<Event>& event) {
  event->make_wait(stream_.handle());
  transfer.add_predecessor(event);
}

void CopyBackend::copy(const Transfer& transfer, uint64_t begin, uint64_t nbytes) {
  const bool is_out = transfer.direction == Direction::kOut;
  const uint64_t device = transfer.device + begin, offset = transfer.block.offset + begin;
  if (const auto* spare = dynamic_cast<const DeviceMemory*>(transfer.block.storage.get())) {
    const DeviceAddress kept = spare->at(offset), own{driver_->device(), device};
    driver_->copy_between(is_out ? kept : own, is_out ? own : kept, nbytes, stream_.handle());
    return;
  }
  std::byte* host = static_cast<const PinnedMemory&>(*transfer.block.storage).data() + offset;
  if (is_out) {
    driver_->copy_out(host, device, nbytes, stream_.handle());
  } else {
    driver_->copy_in(device, host, nbytes, stream_.handle());
  }
}

void CopyBackend::complete(const TransferPointer& transfer) noexcept {
  if (transfer->state.is_failing()) drain();
  transfer->state.settle();
}

void CopyBackend::drain() noexcept { stream_.drain(); }

}  // namespace lmswap
