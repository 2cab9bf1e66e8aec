// How the bytes of one lane travel: three ways, one interface.
//
//   CopyMover     device <-> pinned host memory    the device's own copies, on a stream of the lane
//                 device <-> its own spare memory
//   DirectMover   ordinary memory <-> file         requests of the I/O pool, straight from and to the tensor
//   StagedMover   device <-> file                  both of these, through pieces of pinned memory
#pragma once

#include "lmswap/transfer.h"

namespace lmswap {

class Mover {
 public:
  virtual ~Mover() = default;

  // Starts the copy behind `transfer->ready` and behind the done events of its source and fences, which have landed;
  // calls begin_part for each request that outlives the call. May block, may throw.
  virtual void move(const TransferPointer& transfer) = 0;

  // The last part has ended, here or on another thread: records what is left to record and settles the transfer.
  virtual void complete(const TransferPointer& transfer) noexcept = 0;

  // Blocks until nothing started here is under way.
  virtual void drain() noexcept = 0;
};

}  // namespace lmswap
