#include "lmswap/tiers/io_tier.h"

#include <utility>

#include "lmswap/lanes/direct_backend.h"
#include "lmswap/lanes/gated_backend.h"
#include "lmswap/lanes/staged_backend.h"

namespace lmswap {
namespace {

// The same kind for both directions: they wait for each other on the device or on the host.
std::unique_ptr<TransferBackend> make_backend(const std::shared_ptr<Driver>& driver, IoPool& pool, int num_requests,
                                              const BandwidthLimiter& limiter) {
  if (driver->device_is_host()) return std::make_unique<DirectBackend>(pool, num_requests, limiter);
  if (driver->can_wait_for_host()) return std::make_unique<GatedBackend>(driver, pool, num_requests, limiter);
  return std::make_unique<StagedBackend>(driver, pool, num_requests, limiter);
}

}  // namespace

// Twice as many requests as threads, so that the next one is queued when a thread finishes its own.
IoTier::IoTier(std::string name, const std::shared_ptr<Driver>& driver, std::shared_ptr<Faults> faults,
               uint64_t limit_bytes, int io_threads, const BandwidthLimiters& limiters)
    : Tier(std::move(name), limit_bytes),
      faults_(std::move(faults)),
      pool_(io_threads),
      out_(make_backend(driver, pool_, 2 * io_threads, limiters.out), true),
      in_(make_backend(driver, pool_, 2 * io_threads, limiters.in), true) {}

}  // namespace lmswap
