/// @file
/// @brief Copies between device memory and memory that the device accesses itself.
#pragma once

#include <memory>

#include "lmswap/driver/stream.h"
#include "lmswap/lanes/bandwidth_limiter.h"
#include "lmswap/lanes/gated_link.h"
#include "lmswap/lanes/transfer_backend.h"

namespace lmswap {

/// @brief Device <-> pinned host memory, its own spare memory or a peer's, by device copies on a stream of the lane.
class CopyBackend final : public TransferBackend {
 public:
  /// @throws DriverError if the stream cannot be created; TierError if a thread is refused
  CopyBackend(std::shared_ptr<Driver> driver, BandwidthLimiter limiter);
  void move(const TransferPointer& transfer) override;
  void complete(const TransferPointer& transfer) noexcept override;
  void drain() noexcept override;

 private:
  void wait_behind(Transfer& transfer, const std::shared_ptr<Event>& event);
  void copy(const Transfer& transfer, uint64_t begin, uint64_t nbytes);

  std::shared_ptr<Driver> driver_;
  Stream stream_;
  std::shared_ptr<Event> last_done_;  // of the lane's last copy; null before the first
  std::unique_ptr<GatedLink> link_;   // null where `limiter_` blocks the lane's thread instead
  BandwidthLimiter limiter_;          // no limit where there is a `link_`
};

}  // namespace lmswap
