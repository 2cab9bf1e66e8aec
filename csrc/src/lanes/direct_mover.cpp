#include "lmswap/lanes/direct_mover.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "lmswap/error.h"

namespace lmswap {

DirectMover::DirectMover(IoPool& pool, int num_requests, Pacer pacer)
    : pool_(pool), window_(num_requests), pacer_(std::move(pacer)) {}

void DirectMover::move(const TransferPointer& transfer) {
  // `ready` protects the tensor's bytes, which the calling thread has just written or given up.
  const double ready_seconds = transfer->wait_ready();
  transfer->mark_start(0);
  for (uint64_t begin = 0; begin < transfer->block.nbytes && !transfer->is_failing(); begin += kRequestBytes) {
    const uint64_t nbytes = std::min(kRequestBytes, transfer->block.nbytes - begin);
    request(transfer, begin, nbytes);
    if (pacer_.is_limiting()) transfer->link_start->note(pacer_.pace(nbytes, ready_seconds));
  }
}

void DirectMover::request(const TransferPointer& transfer, uint64_t begin, uint64_t nbytes) {
  window_.enter();
  transfer->begin_part();
  pool_.submit([this, transfer, begin, nbytes](Bounce bounce) {
    auto& storage = static_cast<IoStorage&>(*transfer->block.storage);
    auto* memory = reinterpret_cast<std::byte*>(transfer->device) + begin;
    const uint64_t offset = transfer->block.offset + begin;
    try {
      if (transfer->direction == Direction::kOut) {
        transfer->note(begin, memory, nbytes);
        storage.write(offset, memory, nbytes, bounce);
      } else {
        storage.read(offset, memory, nbytes, bounce);
        transfer->compare(begin, memory, nbytes);
      }
    } catch (const std::exception& error) {
      transfer->fail(error);
    }
    if (transfer->finish_part()) complete(transfer);
    window_.leave();
  });
}

void DirectMover::complete(const TransferPointer& transfer) noexcept {
  try {
    if (!transfer->is_failing()) transfer->done->record(0);
  } catch (const std::exception& error) {
    transfer->fail(error);
  }
  transfer->settle();
}

void DirectMover::drain() noexcept { window_.wait_until_empty(); }

}  // namespace lmswap
