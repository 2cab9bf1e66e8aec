#include "lmswap/tiers/disk_tier.h"

#include <utility>

#include "lmswap/tiers/direct_file.h"
#include "lmswap/tiers/mapped_file.h"

namespace lmswap {

DiskTier::DiskTier(const std::shared_ptr<Driver>& driver, std::shared_ptr<Faults> faults, const std::string& directory,
                   uint64_t limit_bytes, int io_threads, const BandwidthLimiters& limiters)
    : IoTier("disk", driver, std::move(faults), limit_bytes, io_threads, limiters),
      device_is_host_(driver->device_is_host()),
      directory_(directory) {}

std::shared_ptr<Storage> DiskTier::allocate(uint64_t nbytes) {
  return std::make_shared<DirectFile>(directory_, nbytes, faults());
}

std::shared_ptr<Storage> DiskTier::allocate_addressable(uint64_t nbytes) {
  return std::make_shared<MappedFile>(directory_, nbytes, faults());
}

}  // namespace lmswap
