// What is done to a tier's bytes beside moving them: they are read back and summed after a copy (an audit), and
// overwritten when their block is given back (a fill).
//
// Both are transfers like the others: a block's next holder waits for them as it waits for copies.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lmswap/mover.h"
#include "lmswap/storage.h"
#include "lmswap/stream.h"

namespace lmswap {

// Sums over `nbytes`, one for each begun MiB: of its 8-byte words, each times 1, 3, 5 ... so that words which changed
// places are seen too, modulo 2^64. What is missing at the end counts as zeros.
std::vector<uint64_t> checksums(const std::byte* bytes, uint64_t nbytes);

inline constexpr uint64_t kChecksumBytes = 1 << 20;  // of one sum

class UpkeepMover final : public Mover {
 public:
  explicit UpkeepMover(std::shared_ptr<Driver> driver);
  ~UpkeepMover() override;
  void move(const TransferPointer& transfer) override;  // blocks until it is done
  void complete(const TransferPointer& transfer) noexcept override;
  void drain() noexcept override {}

 private:
  std::vector<uint64_t> sum(const Block& block);

  Stream stream_;
  PinnedMemory memory_;
};

}  // namespace lmswap
