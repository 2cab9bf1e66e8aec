#include "lmswap/upkeep_mover.h"

#include <algorithm>
#include <cstring>

#include "lmswap/error.h"

namespace lmswap {

std::vector<uint64_t> checksums(const std::byte* bytes, uint64_t nbytes) {
  std::vector<uint64_t> sums;
  for (uint64_t begin = 0; begin < nbytes; begin += kChecksumBytes) {
    const uint64_t part = std::min(kChecksumBytes, nbytes - begin);
    uint64_t sum = 0, weight = 1;
    for (uint64_t i = 0; i < part; i += sizeof(uint64_t), weight += 2) {
      uint64_t word = 0;
      std::memcpy(&word, bytes + begin + i, std::min<uint64_t>(sizeof word, part - i));
      sum += word * weight;
    }
    sums.push_back(sum);
  }
  return sums;
}

UpkeepMover::UpkeepMover(std::shared_ptr<Driver> driver) : stream_(driver), memory_(driver, kChecksumBytes) {}

// As in StagedMover.
UpkeepMover::~UpkeepMover() { memory_.fill(0, memory_.nbytes(), std::byte{0}, 0); }

void UpkeepMover::move(const TransferPointer& transfer) {
  // The copy that is audited, and on the device's side the block's users, which have landed, must be over.
  if (transfer->source) transfer->source->done.synchronize();
  for (const TransferPointer& fence : transfer->fences) {
    if (!fence->has_failed()) fence->done.synchronize();
  }
  const Block& block = transfer->block;
  if (transfer->direction == Direction::kAudit) {
    transfer->sums = sum(block);
  } else {
    block.storage->fill(block.offset, block.nbytes, transfer->filler, stream_.handle());
  }
}

std::vector<uint64_t> UpkeepMover::sum(const Block& block) {
  std::vector<uint64_t> sums;
  for (uint64_t begin = 0; begin < block.nbytes; begin += kChecksumBytes) {
    const uint64_t part = std::min(kChecksumBytes, block.nbytes - begin);
    block.storage->read_back(block.offset + begin, memory_.data(), part, stream_.handle());
    sums.push_back(checksums(memory_.data(), part).front());
  }
  return sums;
}

void UpkeepMover::complete(const TransferPointer& transfer) noexcept {
  try {
    if (!transfer->is_failing()) transfer->done.record(stream_.handle());
  } catch (const Error& error) {
    transfer->fail(error.what());
  }
  if (transfer->is_failing()) stream_.drain();  // a fill of device memory may be under way
  transfer->settle();
}

}  // namespace lmswap
