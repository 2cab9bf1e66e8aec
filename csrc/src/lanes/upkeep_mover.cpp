#include "lmswap/lanes/upkeep_mover.h"

#include <algorithm>
#include <exception>

#include "lmswap/error.h"

namespace lmswap {

UpkeepMover::UpkeepMover(std::shared_ptr<Driver> driver) : stream_(driver), memory_(driver, kChecksumBytes) {}

// As in StagedMover.
UpkeepMover::~UpkeepMover() { memory_.fill(0, memory_.nbytes(), std::byte{0}); }

void UpkeepMover::move(const TransferPointer& transfer) {
  // The copy that is audited, and on the device's side the block's users, which have landed, must be over.
  if (transfer->source) transfer->source->done->synchronize();
  for (const TransferPointer& fence : transfer->fences) {
    if (!fence->has_failed()) fence->done->synchronize();
  }
  const Block& block = transfer->block;
  if (transfer->direction == Direction::kAudit) {
    transfer->checksums = sum(block);
  } else {
    block.storage->fill(block.offset, block.nbytes, transfer->filler);
  }
}

std::shared_ptr<Checksums> UpkeepMover::sum(const Block& block) {
  auto sums = std::make_shared<Checksums>(block.nbytes);
  for (uint64_t begin = 0; begin < block.nbytes; begin += kChecksumBytes) {
    const uint64_t part = std::min(kChecksumBytes, block.nbytes - begin);
    block.storage->read_back(block.offset + begin, memory_.data(), part);
    sums->note(begin, memory_.data(), part);
  }
  return sums;
}

void UpkeepMover::complete(const TransferPointer& transfer) noexcept {
  try {
    if (!transfer->is_failing()) transfer->done->record(stream_.handle());
  } catch (const std::exception& error) {
    transfer->fail(error);
  }
  transfer->settle();
}

}  // namespace lmswap
