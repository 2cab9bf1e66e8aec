// The tier of files without a name, in a directory on a disk.
#pragma once

#include <memory>
#include <string>

#include "lmswap/tiers/io_tier.h"
#include "lmswap/tiers/swap_directory.h"

namespace lmswap {

class DiskTier final : public IoTier {
 public:
  DiskTier(const std::shared_ptr<Driver>& driver, std::shared_ptr<Faults> faults, const std::string& directory,
           uint64_t limit_bytes, int io_threads, const Pacers& pacers);

 protected:
  std::shared_ptr<Storage> allocate(uint64_t nbytes) override;

 private:
  SwapDirectory directory_;
};

}  // namespace lmswap
