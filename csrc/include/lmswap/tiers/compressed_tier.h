// The tier of host memory that holds bytes compressed. Its limit and capacity count bytes as the device has them, which
// costs addresses only; what they take of the memory is in its stats, and for plans to bound.
#pragma once

#include <memory>

#include "lmswap/tiers/compressed_memory.h"
#include "lmswap/tiers/io_tier.h"

namespace lmswap {

class CompressedTier final : public IoTier {
 public:
  CompressedTier(const std::shared_ptr<Driver>& driver, std::shared_ptr<Faults> faults, uint64_t limit_bytes,
                 int io_threads, const Pacers& pacers);
  TierStats stats() const override;

 protected:
  std::shared_ptr<Storage> allocate(uint64_t nbytes) override;

 private:
  std::shared_ptr<Residency> residency_ = std::make_shared<Residency>();
};

}  // namespace lmswap
