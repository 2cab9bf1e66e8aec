// What is done to a tier's bytes beside moving them: they are read back and summed after a copy (an audit), and
// overwritten when their block is given back (a fill).
//
// Both are transfers like the others: a block's next holder waits for them as it waits for copies.
#pragma once

#include <memory>

#include "lmswap/driver/stream.h"
#include "lmswap/lanes/mover.h"
#include "lmswap/tiers/storage.h"

namespace lmswap {

class UpkeepMover final : public Mover {
 public:
  explicit UpkeepMover(std::shared_ptr<Driver> driver);
  ~UpkeepMover() override;
  void move(const TransferPointer& transfer) override;  // blocks until it is done
  void complete(const TransferPointer& transfer) noexcept override;
  void drain() noexcept override {}

 private:
  std::shared_ptr<Checksums> sum(const Block& block);

  Stream stream_;
  PinnedMemory memory_;
};

}  // namespace lmswap
