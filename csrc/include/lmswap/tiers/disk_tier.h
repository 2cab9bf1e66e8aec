// The tier of files without a name, in a directory on a disk.
#pragma once

#include <memory>
#include <string>

#include "lmswap/lanes/pacer.h"
#include "lmswap/tiers/io_pool.h"
#include "lmswap/tiers/tier.h"

namespace lmswap {

class DiskTier final : public Tier {
 public:
  DiskTier(const std::shared_ptr<Driver>& driver, std::shared_ptr<Faults> faults, const std::string& directory,
           uint64_t limit_bytes, int io_threads, const Pacers& pacers);
  Lane& lane(Direction direction) override;

 protected:
  std::shared_ptr<Storage> allocate(uint64_t nbytes) override;

 private:
  std::shared_ptr<Faults> faults_;
  SwapDirectory directory_;
  IoPool pool_;  // before the lanes, which use it to their end
  Lane out_, in_;
};

}  // namespace lmswap
