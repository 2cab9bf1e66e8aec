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
  try {
    if (place_ == Place::kHost) return std::make_shared<PinnedMemory>(driver_, nbytes, limit_bytes());
    return std::make_shared<DeviceMemory>(driver_, nbytes);
  } catch (const Error& error) {
    throw cannot_be_had(nbytes, error);
  }
}

void MemoryTier::extend(Storage& storage, uint64_t nbytes) {
  try {
    static_cast<PinnedMemory&>(storage).grow(nbytes);
  } catch (const Error& error) {
    throw cannot_be_had(nbytes, error);
  }
}

// The limit on locked memory (RLIMIT_MEMLOCK) has no say: NVIDIA's kernel module pins without looking at it.
Error MemoryTier::cannot_be_had(uint64_t nbytes, const Error& error) const {
  const bool is_host = place_ == Place::kHost;
  return Error(ErrorKind::kTier, (is_host ? "host tier: " : "device tier: ") + format_bytes(nbytes) +
                                     (is_host ? " of pinned memory" : " of spare device memory") +
                                     " cannot be had: " + error.what() +
                                     (is_host ? ". Free host memory, or swap less: a larger budget, or a host_budget"
                                              : ". Free device memory that torch and others hold, or swap less"));
}

}  // namespace lmswap
