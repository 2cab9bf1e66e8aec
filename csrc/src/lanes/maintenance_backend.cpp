#include "lmswap/lanes/maintenance_backend.h"

#include <algorithm>
#include <exception>

#include "lmswap/error.h"

namespace lmswap {

MaintenanceBackend::MaintenanceBackend(std::shared_ptr<Driver> driver)
    : stream_(driver), memory_(driver, kChecksumBytes) {}

// As in StagedBackend.
MaintenanceBackend::~MaintenanceBackend() { memory_.fill(0, memory_.nbytes(), std::byte{0}); }

void MaintenanceBackend::move(const TransferPointer& transfer) {
  // `done` of the audited copy and of the block's users protects the tier's bytes: they have landed, but the device may
  // still access the block.
  if (transfer->source) transfer->source->state.done->synchronize();
  for (const TransferPointer& dependency : transfer->dependencies) {
    if (!dependency->state.has_failed()) dependency->state.done->synchronize();
  }
  const Block& block = transfer->block;
  if (transfer->direction == Direction::kAudit) {
    transfer->checksums = sum(block);
  } else {
    block.storage->fill(block.offset, block.nbytes, transfer->filler);
  }
}

std::shared_ptr<Checksums> MaintenanceBackend::sum(const Block& block) {
  auto sums = std::make_shared<Checksums>(block.nbytes);
  for (uint64_t begin = 0; begin < block.nbytes; begin += kChecksumBytes) {
    const uint64_t part = std::min(kChecksumBytes, block.nbytes - begin);
    block.storage->read_back(block.offset + begin, memory_.data(), part);
    sums->update(begin, memory_.data(), part);
  }
  return sums;
}

void MaintenanceBackend::complete(const TransferPointer& transfer) noexcept {
  try {
    if (!transfer->state.is_failing()) transfer->state.done->record(stream_.handle());
  } catch (const std::exception& error) {
    transfer->state.fail(error);
  }
  transfer->state.settle();
}

}  // namespace lmswap
