/// @file
/// @brief Audits and fills of a tier's bytes.
#pragma once

#include <memory>

#include "lmswap/driver/stream.h"
#include "lmswap/lanes/transfer_backend.h"
#include "lmswap/tiers/storage.h"

namespace lmswap {

/// @brief Computes checksums of a block after a copy (an audit), and overwrites a released block (a fill).
///
/// Both are transfers: copies of a block's next holder wait for them as for copies.
class MaintenanceBackend final : public TransferBackend {
 public:
  /// @throws DriverError if the stream or pinned memory cannot be created
  explicit MaintenanceBackend(std::shared_ptr<Driver> driver);
  ~MaintenanceBackend() override;

  /// @brief Performs the audit or fill; blocks until it is done.
  void move(const TransferPointer& transfer) override;
  void complete(const TransferPointer& transfer) noexcept override;
  void drain() noexcept override {}

 private:
  std::shared_ptr<Checksums> sum(const Block& block);

  Stream stream_;
  PinnedMemory memory_;
};

}  // namespace lmswap
