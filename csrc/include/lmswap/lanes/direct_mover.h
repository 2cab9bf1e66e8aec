// Ordinary memory <-> file by direct I/O, without a copy where the tensor is page-aligned.
#pragma once

#include "lmswap/lanes/mover.h"
#include "lmswap/lanes/pacer.h"
#include "lmswap/lanes/window.h"
#include "lmswap/tiers/io_pool.h"

namespace lmswap {

class DirectMover final : public Mover {
 public:
  DirectMover(IoPool& pool, int num_requests, Pacer pacer);
  void move(const TransferPointer& transfer) override;
  void complete(const TransferPointer& transfer) noexcept override;
  void drain() noexcept override;

 private:
  void request(const TransferPointer& transfer, uint64_t begin, uint64_t nbytes);

  IoPool& pool_;
  Window window_;
  Pacer pacer_;
};

}  // namespace lmswap
