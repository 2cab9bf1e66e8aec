// The tier of pinned host memory, which the device copies to and from by itself.
#pragma once

#include <memory>

#include "lmswap/tier.h"

namespace lmswap {

class HostTier final : public Tier {
 public:
  HostTier(std::shared_ptr<Driver> driver, uint64_t limit_bytes, const LaneOptions& options);
  Lane& lane(Direction direction) override;

 protected:
  std::shared_ptr<Storage> allocate(uint64_t nbytes) override;

 private:
  std::shared_ptr<Driver> driver_;
  Lane out_, in_;
};

}  // namespace lmswap
