/// @file
/// @brief Tiers in memory that the device accesses itself.
#pragma once

#include <memory>

#include "lmswap/error.h"
#include "lmswap/lanes/bandwidth_limiter.h"
#include "lmswap/tiers/tier.h"

namespace lmswap {

/// @brief Pinned host memory, spare memory of the device itself (which emulates a host behind a faster link), or spare
/// memory of a peer.
enum class MemoryKind { kHost, kDevice, kPeer };

/// @brief Memory that the device copies to and from.
class MemoryTier final : public Tier {
 public:
  /// @param driver the device whose bytes are swapped
  /// @param kind where they are kept
  /// @param owner driver of the device that allocates the memory: a peer that `driver` opened, else `driver`
  /// @throws DriverError if a lane's stream cannot be created; TierError if a thread is refused
  MemoryTier(std::shared_ptr<Driver> driver, MemoryKind kind, std::shared_ptr<Driver> owner, uint64_t limit_bytes,
             const BandwidthLimiters& limiters);
  Lane& lane(Direction direction) override;
  [[nodiscard]] bool is_addressable() const override { return kind_ == MemoryKind::kHost; }

 protected:
  std::shared_ptr<Storage> allocate(uint64_t nbytes) override;
  std::shared_ptr<Storage> allocate_addressable(uint64_t nbytes) override;
  [[nodiscard]] uint64_t max_together_bytes() const override { return owner_->registration_bytes(); }
  // Device memory is scarce, and allocated in no time.
  [[nodiscard]] uint64_t growth_bytes() const override { return kind_ == MemoryKind::kHost ? kGrowthBytes : 0; }
  [[nodiscard]] bool is_extended() const override { return kind_ == MemoryKind::kHost && owner_->host_memory_grows(); }
  void extend(Storage& storage, uint64_t nbytes) override;

 private:
  [[nodiscard]] TierError allocation_error(uint64_t nbytes, const Error& error) const;

  const MemoryKind kind_;
  std::shared_ptr<Driver> owner_;
  Lane out_, in_;
};

}  // namespace lmswap
