/// @file
/// @brief How the bytes of one lane are copied: the interface of the transfer backends.
///
///   CopyBackend    device <-> pinned host memory    copies by the device, on a stream of the lane
///                  device <-> its own spare memory, or a peer's
///   DirectBackend  ordinary memory <-> file         requests of the I/O pool, from and to the tensor directly
///   GatedBackend   device <-> file                  both of these, through bounce buffers of pinned memory
///   StagedBackend  device <-> file                  the same where the device cannot wait for the host
#pragma once

#include "lmswap/lanes/transfer.h"

namespace lmswap {

/// @brief Copies transfers in order, for one lane.
///
/// `move` and `abort` are called by the lane's thread. `issue` may run concurrently with them, but for one transfer at
/// a time and in the order of the queue.
class TransferBackend {
 public:
  virtual ~TransferBackend() = default;

  /// @brief Queues on the device what can be queued at once, while the lane's thread runs `move`.
  ///
  /// Called on the thread that submits the transfer; not on lanes without a thread.
  virtual void issue(const TransferPointer&) noexcept {}

  /// @brief Starts the copy behind `transfer->ready` and behind the done events of its source and dependencies, which
  /// have landed; calls `begin_part` for each request that outlives the call. May block.
  /// @throws Error if the copy cannot be started
  virtual void move(const TransferPointer& transfer) = 0;

  /// @brief Releases what `issue` has queued; called instead of `move`, or after it threw.
  virtual void abort(const TransferPointer&) noexcept {}

  /// @brief Records the remaining events and settles the transfer; called after its last part, on any thread.
  virtual void complete(const TransferPointer& transfer) noexcept = 0;

  /// @brief Called when nothing more will be queued, before the lane's thread is joined.
  virtual void end() noexcept {}

  /// @brief Blocks until nothing that was started here is running.
  virtual void drain() noexcept = 0;
};

}  // namespace lmswap
