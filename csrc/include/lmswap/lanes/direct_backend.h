/// @file
/// @brief Copies between ordinary memory and a file.
#pragma once

#include "lmswap/lanes/bandwidth_limiter.h"
#include "lmswap/lanes/request_limiter.h"
#include "lmswap/lanes/transfer_backend.h"
#include "lmswap/tiers/io_pool.h"

namespace lmswap {

/// @brief Ordinary memory <-> file, by requests of the I/O pool; without an extra copy where the tensor is
/// page-aligned.
class DirectBackend final : public TransferBackend {
 public:
  /// @param pool must outlive the backend
  /// @param num_requests the most that run concurrently
  DirectBackend(IoPool& pool, int num_requests, BandwidthLimiter limiter);
  void move(const TransferPointer& transfer) override;
  void complete(const TransferPointer& transfer) noexcept override;
  void drain() noexcept override;

 private:
  void request(const TransferPointer& transfer, uint64_t begin, uint64_t nbytes);

  IoPool& pool_;
  RequestLimiter requests_;
  BandwidthLimiter limiter_;
};

}  // namespace lmswap
