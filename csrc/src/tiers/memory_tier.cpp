#include "lmswap/tiers/memory_tier.h"

#include <string>
#include <utility>

#include "lmswap/error.h"
#include "lmswap/lanes/copy_mover.h"

namespace lmswap {
namespace {

// What a place is called, what it has, and what to do where it has too little. The limit on locked memory
// (RLIMIT_MEMLOCK) has no say: NVIDIA's kernel module pins without looking at it.
struct Words {
  const char *tier, *memory, *advice;
};

Words words_of(Place place) {
  switch (place) {
    case Place::kHost:
      return {"host", "pinned memory", "Free host memory, or swap less: a larger budget, or a host_budget"};
    case Place::kDevice:
      return {"device", "spare device memory", "Free device memory that torch and others hold, or swap less"};
    case Place::kPeer:
      return {"peer", "the other GPU's memory",
              "Free memory there, name another GPU (tier='peer:1'), or swap less: a larger budget, or a host_budget"};
  }
  return {};
}

bool needs_thread(const Driver& driver, const Pacers& pacers) {
  return pacers.is_limiting() && !driver.can_wait_for_host();
}

// What the driver's words leave out; nothing where it cannot say.
std::string free_text(Driver& driver) {
  try {
    const auto [free_bytes, total_bytes] = driver.device_bytes();
    return "; " + format_bytes(free_bytes) + " of its " + format_bytes(total_bytes) + " are free";
  } catch (const Error&) {
    return "";
  }
}

}  // namespace

// A lane that is paced has a thread where the device cannot wait for the emulated link. When one has a thread both do:
// a transfer may wait for one of the other lane, and the caller must not.
MemoryTier::MemoryTier(std::shared_ptr<Driver> driver, Place place, std::shared_ptr<Driver> holder,
                       uint64_t limit_bytes, const Pacers& pacers)
    : Tier(words_of(place).tier, limit_bytes),
      place_(place),
      holder_(std::move(holder)),
      out_(std::make_unique<CopyMover>(driver, pacers.out), needs_thread(*driver, pacers)),
      in_(std::make_unique<CopyMover>(driver, pacers.in), needs_thread(*driver, pacers)) {}

Lane& MemoryTier::lane(Direction direction) { return direction == Direction::kOut ? out_ : in_; }

std::shared_ptr<Storage> MemoryTier::allocate(uint64_t nbytes) {
  try {
    if (place_ == Place::kHost) return std::make_shared<PinnedMemory>(holder_, nbytes, limit_bytes());
    return std::make_shared<DeviceMemory>(holder_, nbytes);
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

Error MemoryTier::cannot_be_had(uint64_t nbytes, const Error& error) const {
  const auto [tier, memory, advice] = words_of(place_);
  return Error(ErrorKind::kTier, std::string(tier) + " tier: " + format_bytes(nbytes) + " of " + memory +
                                     " cannot be had: " + error.what() +
                                     (place_ == Place::kHost ? "" : free_text(*holder_)) + ". " + advice);
}

}  // namespace lmswap
