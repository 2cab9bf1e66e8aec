// A queue of transfers in one direction: they begin in the order in which they were queued, by one thread at a time.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "lmswap/lanes/mover.h"

namespace lmswap {

class Lane {
 public:
  // With a thread when moving may block (disk, pacing); without one a transfer is queued on the device by the caller.
  // Throws Error(kTier) where the system refuses the thread.
  Lane(std::unique_ptr<Mover> mover, bool has_thread);
  ~Lane();  // after everything submitted has ended

  void submit(TransferPointer transfer);

 private:
  void run();
  void start(const TransferPointer& transfer) noexcept;

  std::unique_ptr<Mover> mover_;
  const bool has_thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TransferPointer> queue_;
  bool is_closing_ = false;
  std::thread thread_;
};

}  // namespace lmswap
