#include "lmswap/host_tier.h"

#include <utility>

#include "lmswap/copy_mover.h"
#include "lmswap/error.h"

namespace lmswap {
namespace {

bool is_paced(const LaneOptions& options) {
  return options.out_bytes_per_second > 0 || options.in_bytes_per_second > 0;
}

}  // namespace

// When one lane has a thread both do: a transfer may wait for one of the other lane, and the caller must not.
HostTier::HostTier(std::shared_ptr<Driver> driver, uint64_t limit_bytes, const LaneOptions& options)
    : Tier("host", limit_bytes),
      driver_(std::move(driver)),
      out_(std::make_unique<CopyMover>(driver_, options.out_bytes_per_second), is_paced(options)),
      in_(std::make_unique<CopyMover>(driver_, options.in_bytes_per_second), is_paced(options)) {}

Lane& HostTier::lane(Direction direction) { return direction == Direction::kOut ? out_ : in_; }

std::shared_ptr<Storage> HostTier::allocate(uint64_t nbytes) {
  try {
    return std::make_shared<PinnedMemory>(driver_, nbytes);
  } catch (const Error& error) {
    throw Error(ErrorKind::kTier, "host tier: " + format_bytes(nbytes) +
                                      " of pinned memory cannot be had: " + error.what() +
                                      ". Free host memory, raise the limit on locked memory, or swap less");
  }
}

}  // namespace lmswap
