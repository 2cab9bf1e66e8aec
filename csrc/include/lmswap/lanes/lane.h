/// @file
/// @brief A queue of transfers in one direction.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "lmswap/lanes/transfer_backend.h"

namespace lmswap {

/// @brief Starts transfers in the order in which they were submitted, on one thread at a time. Callers serialize
/// `submit` (the engine by its lock), as the order in which the backend issues transfers must be that of the queue.
class Lane {
 public:
  /// @param backend copies the bytes
  /// @param has_thread whether the lane has a thread, for backends that block (disk, limited bandwidth); else transfers
  /// are queued on the device by the submitting thread
  /// @throws TierError if the system refuses the thread
  Lane(std::unique_ptr<TransferBackend> backend, bool has_thread);

  /// @brief Waits for all submitted transfers.
  ~Lane();

  /// @brief Queues a transfer. Everything that it waits for must have been submitted before, to any lane.
  ///
  /// A transfer that cannot be started fails; its error is not thrown here.
  void submit(TransferPointer transfer);

 private:
  void run();
  void start(const TransferPointer& transfer) noexcept;

  std::unique_ptr<TransferBackend> backend_;
  const bool has_thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TransferPointer> queue_;
  bool is_closing_ = false;
  std::thread thread_;
};

}  // namespace lmswap
