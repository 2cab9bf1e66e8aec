/// @file
/// @brief Copies between device memory and a file, on a device that cannot wait for the host.
#pragma once

#include <memory>
#include <vector>

#include "lmswap/driver/stream.h"
#include "lmswap/lanes/bandwidth_limiter.h"
#include "lmswap/lanes/request_limiter.h"
#include "lmswap/lanes/transfer_backend.h"
#include "lmswap/tiers/io_pool.h"

namespace lmswap {

/// @brief Device <-> file through bounce buffers of pinned memory, several of them in use at once.
class StagedBackend final : public TransferBackend {
 public:
  /// @param pool must outlive the backend
  /// @param num_buffers number of bounce buffers, of `kRequestBytes` each
  /// @throws DriverError if the stream, an event or pinned memory cannot be created
  StagedBackend(std::shared_ptr<Driver> driver, IoPool& pool, int num_buffers, BandwidthLimiter limiter);
  ~StagedBackend() override;
  void move(const TransferPointer& transfer) override;
  void complete(const TransferPointer& transfer) noexcept override;
  void drain() noexcept override;

 private:
  // `in_use` protects the bytes while a thread uses them, `copied` after that.
  struct BounceBuffer {
    BounceBuffer(const std::shared_ptr<Driver>& driver, std::byte* memory) : data(memory), copied(driver) {}
    std::byte* data;
    Event copied;
    bool is_recorded = false;
    RequestLimiter in_use{1};
  };

  BounceBuffer& next_buffer();
  void request(const TransferPointer& transfer, BounceBuffer& buffer, uint64_t begin, uint64_t nbytes);
  void write(Transfer& transfer, BounceBuffer& buffer, uint64_t begin, uint64_t nbytes, Scratch scratch);
  void read(Transfer& transfer, BounceBuffer& buffer, uint64_t begin, uint64_t nbytes, Scratch scratch);

  std::shared_ptr<Driver> driver_;
  IoPool& pool_;
  Stream stream_;
  PinnedMemory memory_;
  std::vector<std::unique_ptr<BounceBuffer>> buffers_;
  size_t next_ = 0;
  BandwidthLimiter limiter_;
};

}  // namespace lmswap
