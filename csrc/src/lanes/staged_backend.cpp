#include "lmswap/lanes/staged_backend.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "lmswap/error.h"

namespace lmswap {

StagedBackend::StagedBackend(std::shared_ptr<Driver> driver, IoPool& pool, int num_buffers, BandwidthLimiter limiter)
    : driver_(std::move(driver)),
      pool_(pool),
      stream_(driver_),
      memory_(driver_, static_cast<uint64_t>(num_buffers) * kRequestBytes),
      limiter_(std::move(limiter)) {
  for (uint64_t i = 0; i < static_cast<uint64_t>(num_buffers); ++i) {
    buffers_.push_back(std::make_unique<BounceBuffer>(driver_, memory_.data() + i * kRequestBytes));
  }
}

// No swapped bytes remain in freed memory; 32 MiB take some milliseconds, so this is not an option.
StagedBackend::~StagedBackend() { memory_.fill(0, memory_.nbytes(), std::byte{0}); }

void StagedBackend::move(const TransferPointer& transfer) {
  // `ready` protects the device memory: what the caller's stream still writes into it, or reads for its previous owner.
  // The lane's thread waits for it too, so that requests never occupy the I/O threads while the device computes.
  transfer->ready.make_wait(stream_.handle());
  transfer->record_start(stream_.handle());
  const double ready_seconds = transfer->wait_ready();
  for (uint64_t begin = 0; begin < transfer->block.nbytes && !transfer->state.is_failing(); begin += kRequestBytes) {
    const uint64_t nbytes = std::min(kRequestBytes, transfer->block.nbytes - begin);
    request(transfer, next_buffer(), begin, nbytes);
    if (limiter_.is_limiting()) transfer->link_start->record(limiter_.throttle(nbytes, ready_seconds));
  }
  if (transfer->direction == Direction::kIn || transfer->state.is_failing()) return;
  // The bytes have left the device after the last queued copy, but are not in the file yet.
  transfer->state.done->record(stream_.handle());
  transfer->state.set_issued();
}

// Bounce buffers are used in turn, so the next one is the one that has been in use for longest.
StagedBackend::BounceBuffer& StagedBackend::next_buffer() {
  BounceBuffer& buffer = *buffers_[next_];
  next_ = (next_ + 1) % buffers_.size();
  buffer.in_use.acquire();
  return buffer;
}

void StagedBackend::request(const TransferPointer& transfer, BounceBuffer& buffer, uint64_t begin, uint64_t nbytes) {
  try {
    // `copied` protects the buffer: the device may still read it for the previous request.
    if (buffer.is_recorded) buffer.copied.synchronize();
    if (transfer->direction == Direction::kOut) {
      driver_->copy_out(buffer.data, transfer->device + begin, nbytes, stream_.handle());
      buffer.copied.record(stream_.handle());
      buffer.is_recorded = true;
    }
  } catch (...) {
    buffer.in_use.release();
    throw;
  }
  transfer->state.begin_part();
  pool_.submit([this, transfer, &buffer, begin, nbytes](Scratch scratch) {
    try {
      if (transfer->direction == Direction::kOut) {
        write(*transfer, buffer, begin, nbytes, scratch);
      } else {
        read(*transfer, buffer, begin, nbytes, scratch);
      }
    } catch (const std::exception& error) {
      transfer->state.fail(error);
    }
    if (transfer->state.finish_part()) complete(transfer);
    buffer.in_use.release();
  });
}

void StagedBackend::write(Transfer& transfer, BounceBuffer& buffer, uint64_t begin, uint64_t nbytes, Scratch scratch) {
  buffer.copied.synchronize();  // protects the buffer's bytes: they may not have arrived from the device yet
  transfer.record_checksums(begin, buffer.data, nbytes);
  static_cast<IoStorage&>(*transfer.block.storage).write(transfer.block.offset + begin, buffer.data, nbytes, scratch);
}

void StagedBackend::read(Transfer& transfer, BounceBuffer& buffer, uint64_t begin, uint64_t nbytes, Scratch scratch) {
  static_cast<IoStorage&>(*transfer.block.storage).read(transfer.block.offset + begin, buffer.data, nbytes, scratch);
  transfer.verify_checksums(begin, buffer.data, nbytes);
  driver_->copy_in(transfer.device + begin, buffer.data, nbytes, stream_.handle());
  buffer.copied.record(stream_.handle());
  buffer.is_recorded = true;
}

void StagedBackend::complete(const TransferPointer& transfer) noexcept {
  try {
    // Behind the copies of all bounce buffers: they are queued before their parts end.
    if (transfer->direction == Direction::kIn && !transfer->state.is_failing())
      transfer->state.done->record(stream_.handle());
  } catch (const std::exception& error) {
    transfer->state.fail(error);
  }
  if (transfer->state.is_failing()) stream_.drain();
  transfer->state.settle();
}

void StagedBackend::drain() noexcept {
  for (const auto& buffer : buffers_) buffer->in_use.wait_until_idle();
  stream_.drain();
}

}  // namespace lmswap
