#include "lmswap/lanes/direct_backend.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "lmswap/error.h"

namespace lmswap {

DirectBackend::DirectBackend(IoPool& pool, int num_requests, BandwidthLimiter limiter)
    : pool_(pool), requests_(num_requests), limiter_(std::move(limiter)) {}

void DirectBackend::move(const TransferPointer& transfer) {
  // `ready` protects the tensor's bytes, which the calling thread has just written or released.
  const double ready_seconds = transfer->wait_ready();
  transfer->record_start(0);
  for (uint64_t begin = 0; begin < transfer->block.nbytes && !transfer->state.is_failing(); begin += kRequestBytes) {
    const uint64_t nbytes = std::min(kRequestBytes, transfer->block.nbytes - begin);
    request(transfer, begin, nbytes);
    if (limiter_.is_limiting()) transfer->link_start->record(limiter_.throttle(nbytes, ready_seconds));
  }
}

void DirectBackend::request(const TransferPointer& transfer, uint64_t begin, uint64_t nbytes) {
  requests_.acquire();
  transfer->state.begin_part();
  pool_.submit([this, transfer, begin, nbytes](Scratch scratch) {
    auto& storage = static_cast<IoStorage&>(*transfer->block.storage);
    auto* memory = reinterpret_cast<std::byte*>(transfer->device) + begin;
    const uint64_t offset = transfer->block.offset + begin;
    try {
      if (transfer->direction == Direction::kOut) {
        transfer->record_checksums(begin, memory, nbytes);
        storage.write(offset, memory, nbytes, scratch);
      } else {
        storage.read(offset, memory, nbytes, scratch);
        transfer->verify_checksums(begin, memory, nbytes);
      }
    } catch (const std::exception& error) {
      transfer->state.fail(error);
    }
    if (transfer->state.finish_part()) complete(transfer);
    requests_.release();
  });
}

void DirectBackend::complete(const TransferPointer& transfer) noexcept {
  try {
    if (!transfer->state.is_failing()) transfer->state.done->record(0);
  } catch (const std::exception& error) {
    transfer->state.fail(error);
  }
  transfer->state.settle();
}

void DirectBackend::drain() noexcept { requests_.wait_until_idle(); }

}  // namespace lmswap
