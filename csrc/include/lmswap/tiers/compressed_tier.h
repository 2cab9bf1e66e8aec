/// @file
/// @brief The tier of compressed host memory.
#pragma once

#include <memory>

#include "lmswap/tiers/compressed_memory.h"
#include "lmswap/tiers/io_tier.h"

namespace lmswap {

/// @brief Compressed host memory.
///
/// Limit and capacity count uncompressed bytes, which only occupy addresses. The memory in use is in `stats`; limiting
/// it is left to the plan.
class CompressedTier final : public IoTier {
 public:
  /// @throws TierError if the system refuses a thread
  CompressedTier(const std::shared_ptr<Driver>& driver, std::shared_ptr<Faults> faults, uint64_t limit_bytes,
                 int io_threads, const BandwidthLimiters& limiters);
  [[nodiscard]] TierStats stats() const override;

 protected:
  std::shared_ptr<Storage> allocate(uint64_t nbytes) override;

 private:
  std::shared_ptr<Residency> residency_ = std::make_shared<Residency>();
};

}  // namespace lmswap
