#include "lmswap/memory_tier.h"

#include <utility>

#include "lmswap/copy_mover.h"
#include "lmswap/error.h"

namespace lmswap {

// When one lane has a thread both do: a transfer may wait for one of the other lane, and the caller must not.
MemoryTier::MemoryTier(std::shared_ptr<Driver> driver, Place place, uint64_t limit_bytes, const Pacers& pacers)
    : Tier(place == Place::kHost ? "host" : "device", limit_bytes),
      driver_(std::move(driver)),
      place_(place),
      out_(std::make_unique<CopyMover>(driver_, pacers.out), pacers.is_limiting()),
      in_(std::make_unique<CopyMover>(driver_, pacers.in), pacers.is_limiting()) {}

Lane& MemoryTier::lane(Direction direction) { return direction == Direction::kOut ? out_ : in_; }

std::shared_ptr<Storage> MemoryTier::allocate(uint64_t nbytes) {
  const bool is_host = place_ == Place::kHost;
  try {
    if (is_host) return std::make_shared<PinnedMemory>(driver_, nbytes);
    return std::make_shared<DeviceMemory>(driver_, nbytes);
  } catch (const Error& error) {
    throw Error(ErrorKind::kTier, (is_host ? "host tier: " : "device tier: ") + format_bytes(nbytes) +
                                      (is_host ? " of pinned memory" : " of spare device memory") +
                                      " cannot be had: " + error.what() +
                                      (is_host ? ". Free host memory, raise the limit on locked memory, or swap less"
                                               : ". Free device memory that torch and others hold, or swap less"));
  }
}

}  // namespace lmswap
