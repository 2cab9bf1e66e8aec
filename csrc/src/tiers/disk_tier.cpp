#include "lmswap/tiers/disk_tier.h"

#include <utility>

#include "lmswap/tiers/direct_file.h"

namespace lmswap {

DiskTier::DiskTier(const std::shared_ptr<Driver>& driver, std::shared_ptr<Faults> faults, const std::string& directory,
                   uint64_t limit_bytes, int io_threads, const BandwidthLimiters& limiters)
    : IoTier("disk", driver, std::move(faults), limit_bytes, io_threads, limiters), directory_(directory) {}

std::shared_ptr<Storage> DiskTier::allocate(uint64_t nbytes) {
  return std::make_shared<DirectFile>(directory_, nbytes, faults());
}

}  // namespace lmswap
