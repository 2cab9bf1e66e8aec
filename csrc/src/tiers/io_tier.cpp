#include "lmswap/tiers/io_tier.h"

#include <utility>

#include "lmswap/lanes/direct_mover.h"
#include "lmswap/lanes/gated_mover.h"
#include "lmswap/lanes/staged_mover.h"

namespace lmswap {
namespace {

// Both ways by one kind of mover: they wait for one another on the device or on the host.
std::unique_ptr<Mover> make_mover(const std::shared_ptr<Driver>& driver, IoPool& pool, int num_requests,
                                  const Pacer& pacer) {
  if (driver->device_is_host()) return std::make_unique<DirectMover>(pool, num_requests, pacer);
  if (driver->can_wait_for_host()) return std::make_unique<GatedMover>(driver, pool, num_requests, pacer);
  return std::make_unique<StagedMover>(driver, pool, num_requests, pacer);
}

}  // namespace

// Twice as many requests as threads: the next one is there when a thread ends its own.
IoTier::IoTier(std::string name, const std::shared_ptr<Driver>& driver, std::shared_ptr<Faults> faults,
               uint64_t limit_bytes, int io_threads, const Pacers& pacers)
    : Tier(std::move(name), limit_bytes),
      faults_(std::move(faults)),
      pool_(io_threads),
      out_(make_mover(driver, pool_, 2 * io_threads, pacers.out), true),
      in_(make_mover(driver, pool_, 2 * io_threads, pacers.in), true) {}

}  // namespace lmswap
