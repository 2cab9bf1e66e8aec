/// @file
/// @brief The tier of unnamed files in a directory.
#pragma once

#include <memory>
#include <string>

#include "lmswap/tiers/io_tier.h"
#include "lmswap/tiers/swap_directory.h"

namespace lmswap {

/// @brief Files on a disk.
class DiskTier final : public IoTier {
 public:
  /// @throws TierError if the directory cannot be used (see SwapDirectory) or the system refuses a thread
  DiskTier(const std::shared_ptr<Driver>& driver, std::shared_ptr<Faults> faults, const std::string& directory,
           uint64_t limit_bytes, int io_threads, const BandwidthLimiters& limiters);
  [[nodiscard]] bool is_addressable() const override { return device_is_host_; }

 protected:
  std::shared_ptr<Storage> allocate(uint64_t nbytes) override;
  std::shared_ptr<Storage> allocate_addressable(uint64_t nbytes) override;

 private:
  const bool device_is_host_;
  SwapDirectory directory_;
};

}  // namespace lmswap
