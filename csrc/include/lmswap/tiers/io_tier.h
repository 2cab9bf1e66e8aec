/// @file
/// @brief A tier whose bytes are read and written by I/O threads.
#pragma once

#include <memory>
#include <string>

#include "lmswap/lanes/bandwidth_limiter.h"
#include "lmswap/tiers/io_pool.h"
#include "lmswap/tiers/tier.h"

namespace lmswap {

/// @brief Base of the tiers with a thread pool.
class IoTier : public Tier {
 public:
  Lane& lane(Direction direction) override { return direction == Direction::kOut ? out_ : in_; }

 protected:
  /// @brief `allocate` of a subclass must return an `IoStorage`.
  /// @throws TierError if the system refuses a thread
  IoTier(std::string name, const std::shared_ptr<Driver>& driver, std::shared_ptr<Faults> faults, uint64_t limit_bytes,
         int io_threads, const BandwidthLimiters& limiters);
  [[nodiscard]] uint64_t growth_bytes() const override { return kGrowthBytes; }
  [[nodiscard]] const std::shared_ptr<Faults>& faults() const { return faults_; }

 private:
  std::shared_ptr<Faults> faults_;
  IoPool pool_;  // declared before the lanes, which use it until they are destroyed
  Lane out_, in_;
};

}  // namespace lmswap
