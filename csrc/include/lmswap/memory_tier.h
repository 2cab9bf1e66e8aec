// The tiers that the device copies to and from by itself: pinned host memory, and spare memory of its own, which only
// stands in for a host behind a faster link.
#pragma once

#include <memory>

#include "lmswap/error.h"
#include "lmswap/pacer.h"
#include "lmswap/tier.h"

namespace lmswap {

enum class Place { kHost, kDevice };

class MemoryTier final : public Tier {
 public:
  MemoryTier(std::shared_ptr<Driver> driver, Place place, uint64_t limit_bytes, const Pacers& pacers);
  Lane& lane(Direction direction) override;

 protected:
  std::shared_ptr<Storage> allocate(uint64_t nbytes) override;
  bool is_extended() const override { return place_ == Place::kHost && driver_->host_memory_grows(); }
  void extend(Storage& storage, uint64_t nbytes) override;

 private:
  Error cannot_be_had(uint64_t nbytes, const Error& error) const;

  std::shared_ptr<Driver> driver_;
  const Place place_;
  Lane out_, in_;
};

}  // namespace lmswap
