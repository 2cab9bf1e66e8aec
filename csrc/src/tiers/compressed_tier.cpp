#include "lmswap/tiers/compressed_tier.h"

#include <utility>

namespace lmswap {

CompressedTier::CompressedTier(const std::shared_ptr<Driver>& driver, std::shared_ptr<Faults> faults,
                               uint64_t limit_bytes, int io_threads, const BandwidthLimiters& limiters)
    : IoTier("compressed", driver, std::move(faults), limit_bytes, io_threads, limiters) {}

TierStats CompressedTier::stats() const {
  TierStats stats = Tier::stats();
  stats.resident_bytes = residency_->now_bytes();
  stats.peak_resident_bytes = residency_->peak_bytes();
  return stats;
}

std::shared_ptr<Storage> CompressedTier::allocate(uint64_t nbytes) {
  return std::make_shared<CompressedMemory>(nbytes, faults(), residency_);
}

}  // namespace lmswap
