#include "lmswap/tiers/memory_tier.h"

#include <string>
#include <utility>

#include "lmswap/error.h"
#include "lmswap/lanes/copy_backend.h"

namespace lmswap {
namespace {

// Texts for errors. The limit on locked memory (RLIMIT_MEMLOCK) is irrelevant: NVIDIA's kernel module ignores it.
struct Words {
  const char *tier, *memory, *advice;
};

Words words_of(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kHost:
      return {"host", "pinned memory", "Free host memory, or swap less: a larger budget, or a host_budget"};
    case MemoryKind::kDevice:
      return {"device", "spare device memory", "Free device memory that torch and others hold, or swap less"};
    case MemoryKind::kPeer:
      return {"peer", "the other GPU's memory",
              "Free memory there, name another GPU (tier='peer:1'), or swap less: a larger budget, or a host_budget"};
  }
  return {};
}

bool needs_thread(const Driver& driver, const BandwidthLimiters& limiters) {
  return limiters.is_limiting() && !driver.can_wait_for_host();
}

// Complements the driver's message; empty if the driver cannot be queried.
std::string free_text(Driver& driver) {
  try {
    const auto [free_bytes, total_bytes] = driver.device_bytes();
    return "; " + format_bytes(free_bytes) + " of its " + format_bytes(total_bytes) + " are free";
  } catch (const Error&) {
    return "";
  }
}

}  // namespace

// A lane with limited bandwidth has a thread where the device cannot wait for the emulated link. If one lane has a
// thread both do: a transfer may wait for one of the other lane, and the caller must not block.
MemoryTier::MemoryTier(std::shared_ptr<Driver> driver, MemoryKind kind, std::shared_ptr<Driver> owner,
                       uint64_t limit_bytes, const BandwidthLimiters& limiters)
    : Tier(words_of(kind).tier, limit_bytes),
      kind_(kind),
      owner_(std::move(owner)),
      out_(std::make_unique<CopyBackend>(driver, limiters.out), needs_thread(*driver, limiters)),
      in_(std::make_unique<CopyBackend>(driver, limiters.in), needs_thread(*driver, limiters)) {}

Lane& MemoryTier::lane(Direction direction) { return direction == Direction::kOut ? out_ : in_; }

std::shared_ptr<Storage> MemoryTier::allocate(uint64_t nbytes) {
  try {
    if (kind_ == MemoryKind::kHost) return std::make_shared<PinnedMemory>(owner_, nbytes, limit_bytes());
    return std::make_shared<DeviceMemory>(owner_, nbytes);
  } catch (const Error& error) {
    throw allocation_error(nbytes, error);
  }
}

std::shared_ptr<Storage> MemoryTier::allocate_addressable(uint64_t nbytes) {
  std::shared_ptr<AddressableMemory> memory;
  bool is_usable = false;
  try {
    memory = std::make_shared<AddressableMemory>(owner_, nbytes);
    is_usable = memory->has_one_address();
  } catch (const Error& error) {
    throw allocation_error(nbytes, error);
  }
  if (is_usable) return memory;
  throw TierError(std::string(words_of(kind_).tier) +
                  " tier: the GPU addresses pinned memory otherwise than the host does, as under WSL2, so its kernels "
                  "cannot use weights that lie there. Keep the weights on the device: weights=\"keep\"");
}

void MemoryTier::extend(Storage& storage, uint64_t nbytes) {
  try {
    static_cast<PinnedMemory&>(storage).grow(nbytes);
  } catch (const Error& error) {
    throw allocation_error(nbytes, error);
  }
}

TierError MemoryTier::allocation_error(uint64_t nbytes, const Error& error) const {
  const auto [tier, memory, advice] = words_of(kind_);
  return TierError(std::string(tier) + " tier: " + format_bytes(nbytes) + " of " + memory + " cannot be had: " +
                   error.what() + (kind_ == MemoryKind::kHost ? "" : free_text(*owner_)) + ". " + advice);
}

}  // namespace lmswap
