// A tier whose bytes are moved by the CPU, by requests that run on a pool of threads.
#pragma once

#include <memory>
#include <string>

#include "lmswap/lanes/pacer.h"
#include "lmswap/tiers/io_pool.h"
#include "lmswap/tiers/tier.h"

namespace lmswap {

class IoTier : public Tier {
 public:
  Lane& lane(Direction direction) override { return direction == Direction::kOut ? out_ : in_; }

 protected:
  // Its storages are of the kind `IoStorage`.
  IoTier(std::string name, const std::shared_ptr<Driver>& driver, std::shared_ptr<Faults> faults, uint64_t limit_bytes,
         int io_threads, const Pacers& pacers);
  uint64_t more_at_once_bytes() const override { return kMoreAtOnceBytes; }
  const std::shared_ptr<Faults>& faults() const { return faults_; }

 private:
  std::shared_ptr<Faults> faults_;
  IoPool pool_;  // before the lanes, which use it to their end
  Lane out_, in_;
};

}  // namespace lmswap
