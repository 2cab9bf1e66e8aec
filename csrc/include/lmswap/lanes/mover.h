// How the bytes of one lane travel: four ways, one interface.
//
//   CopyMover     device <-> pinned host memory    the device's own copies, on a stream of the lane
//                 device <-> its own spare memory, or a peer's
//   DirectMover   ordinary memory <-> file         requests of the I/O pool, straight from and to the tensor
//   GatedMover    device <-> file                  both of these, through pieces of pinned memory
//   StagedMover   device <-> file                  the same where the device cannot wait for the host
#pragma once

#include "lmswap/lanes/transfer.h"

namespace lmswap {

class Mover {
 public:
  virtual ~Mover() = default;

  // Gives the device what it can be given at once, on the thread that queues the transfer, while the lane's thread
  // moves it. Not on lanes without a thread.
  virtual void issue(const TransferPointer&) noexcept {}

  // Starts the copy behind `transfer->ready` and behind the done events of its source and fences, which have landed;
  // calls begin_part for each request that outlives the call. May block, may throw.
  virtual void move(const TransferPointer& transfer) = 0;

  // Instead, or when that has failed: lets go of what was issued.
  virtual void give_up(const TransferPointer&) noexcept {}

  // The last part has ended, here or on another thread: records what is left to record and settles the transfer.
  virtual void complete(const TransferPointer& transfer) noexcept = 0;

  // Nothing more is queued, and the lane's thread is about to be waited for.
  virtual void end() noexcept {}

  // Blocks until nothing started here is under way.
  virtual void drain() noexcept = 0;
};

}  // namespace lmswap
