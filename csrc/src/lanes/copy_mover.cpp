#include "lmswap/lanes/copy_mover.h"

#include <algorithm>
#include <utility>

#include "lmswap/error.h"

namespace lmswap {
namespace {

// A copy of the program's own in the same direction, an input or what `.item()` reads, gets its turn on the copy engine
// between two pieces: on PCIe gen5 after half a millisecond at most, where one of 1 GiB takes 19.
constexpr uint64_t kPieceBytes = uint64_t{32} << 20;

}  // namespace

CopyMover::CopyMover(std::shared_ptr<Driver> driver, Pacer pacer)
    : driver_(std::move(driver)),
      stream_(driver_),
      link_(GatedLink::make(driver_, pacer)),
      pacer_(link_ ? Pacer() : std::move(pacer)) {}

void CopyMover::move(const TransferPointer& transfer) {
  // `ready` protects the device memory: on the way out what the caller's stream writes into it, on the way in what
  // kernels queued there still read from the block's previous owner.
  transfer->ready.make_wait(stream_.handle());
  // The source's `done` protects the tier's bytes that this copy reads: they may not have arrived yet.
  if (transfer->source && !transfer->is_behind_source) queue_behind(*transfer, transfer->source->done);
  // The fences' `done` protect the tier's bytes that this copy overwrites: their last holder's copy may still read
  // them.
  for (const TransferPointer& fence : transfer->fences) {
    if (!fence->has_failed()) queue_behind(*transfer, fence->done);
  }
  if (link_) link_->begin(*transfer);
  // An emulated link starts when the bytes are there, not when the copy is queued; a lane's thread may block.
  const double ready_seconds = pacer_.is_limiting() ? transfer->wait_ready() : 0;
  if (last_done_) transfer->begin_behind(last_done_);
  const uint64_t chunk_bytes = pacer_.is_limiting() ? pacer_.chunk_bytes() : kPieceBytes;
  for (uint64_t begin = 0; begin < transfer->block.nbytes; begin += chunk_bytes) {
    const uint64_t nbytes = std::min(chunk_bytes, transfer->block.nbytes - begin);
    copy(*transfer, begin, nbytes);
    if (pacer_.is_limiting()) transfer->link_start->note(pacer_.pace(nbytes, ready_seconds));
  }
  if (link_) link_->end(stream_.handle());
  transfer->done->record(stream_.handle());
  last_done_ = transfer->done;
}

void CopyMover::queue_behind(Transfer& transfer, const std::shared_ptr<Event>& event) {
  event->make_wait(stream_.handle());
  transfer.begin_behind(event);
}

void CopyMover::copy(const Transfer& transfer, uint64_t begin, uint64_t nbytes) {
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

void CopyMover::complete(const TransferPointer& transfer) noexcept {
  if (transfer->is_failing()) drain();
  transfer->settle();
}

void CopyMover::drain() noexcept { stream_.drain(); }

}  // namespace lmswap
