// The tiers that the device copies to and from by itself: pinned host memory, spare memory of a peer, and spare memory
// of its own, which only stands in for a host behind a faster link.
#pragma once

#include <memory>

#include "lmswap/error.h"
#include "lmswap/lanes/pacer.h"
#include "lmswap/tiers/tier.h"

namespace lmswap {

enum class Place { kHost, kDevice, kPeer };

class MemoryTier final : public Tier {
 public:
  // `holder` is the driver of the device whose memory holds the bytes: a peer that `driver` opened, else `driver`.
  MemoryTier(std::shared_ptr<Driver> driver, Place place, std::shared_ptr<Driver> holder, uint64_t limit_bytes,
             const Pacers& pacers);
  Lane& lane(Direction direction) override;

 protected:
  std::shared_ptr<Storage> allocate(uint64_t nbytes) override;
  // Memory of a device is scarce, and had at once.
  uint64_t more_at_once_bytes() const override { return place_ == Place::kHost ? kMoreAtOnceBytes : 0; }
  bool is_extended() const override { return place_ == Place::kHost && holder_->host_memory_grows(); }
  void extend(Storage& storage, uint64_t nbytes) override;

 private:
  Error cannot_be_had(uint64_t nbytes, const Error& error) const;

  const Place place_;
  std::shared_ptr<Driver> holder_;
  Lane out_, in_;
};

}  // namespace lmswap
