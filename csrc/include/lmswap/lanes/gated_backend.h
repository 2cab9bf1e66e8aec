/// @file
/// @brief Copies between device memory and a file, on a device that can wait for the host.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "lmswap/driver/stream.h"
#include "lmswap/lanes/gated_link.h"
#include "lmswap/lanes/request_limiter.h"
#include "lmswap/lanes/transfer_backend.h"
#include "lmswap/tiers/io_pool.h"

namespace lmswap {

/// @brief The last mark that a stream has passed, as reported by the device's callbacks. Thread-safe.
class StreamProgress {
 public:
  /// @brief The stream has passed a mark; called in the order of numbers.
  /// @param code 0, or the driver's error code when the device has failed
  void advance(uint64_t number, int code);

  /// @brief A mark was not queued, and will not be passed.
  void skip(uint64_t number);

  /// @brief The device has failed, and may pass no further marks.
  void fail(const std::string& text);

  /// @brief Blocks until a mark has been passed or skipped, or the device has failed.
  /// @return false if the device has failed
  bool wait_for(uint64_t number);

  /// @return the message of the failure
  [[nodiscard]] std::string error_text() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t last_ = 0;
  std::set<uint64_t> skipped_;
  std::string error_;
};

/// @brief Device <-> file through bounce buffers of pinned memory.
///
/// All device copies of a transfer are queued when it is submitted, so that streams can wait for them from then on and
/// the host continues at once:
///
///   stream   mark · gate, copy, mark · gate, copy, mark · ... · done
///   host     in:  reads into a buffer when its last copy has passed its mark, and opens its gate
///            out: writes a buffer when its copy has passed its mark, and opens its gate for the next one
///
/// CUDA does not see this order, and a wait can block other streams that share a hardware queue with it. Hence the rule
/// of `Driver::wait_value`: a gate depends on nothing that was queued on the device after its wait, and the threads
/// that open gates make no driver calls; each copy is pushed to them before it is queued. A failed request opens its
/// gate, too: a failed copy in delivers zeros, which are valid whatever the bytes were (indices, for example), until
/// `Engine::confirm` reports the failure.
class GatedBackend final : public TransferBackend {
 public:
  /// @param pool must outlive the backend
  /// @param num_buffers number of bounce buffers, of `kRequestBytes` each
  /// @throws DriverError if the stream or pinned memory cannot be created; TierError if a thread is refused
  GatedBackend(std::shared_ptr<Driver> driver, IoPool& pool, int num_buffers, const BandwidthLimiter& limiter);
  ~GatedBackend() override;
  void issue(const TransferPointer& transfer) noexcept override;
  void move(const TransferPointer& transfer) override { serve(transfer); }
  void abort(const TransferPointer& transfer) noexcept override { serve(transfer); }
  void complete(const TransferPointer& transfer) noexcept override { transfer->state.settle(); }
  void end() noexcept override;
  void drain() noexcept override;

 private:
  struct BounceBuffer {
    BounceBuffer(std::byte* memory, uint64_t* gate_) : data(memory), gate(gate_) {}
    std::byte* const data;
    uint64_t* const gate;      // number of uses that the host has ended
    uint64_t num_uses = 0;     // counted by the issuing thread
    uint64_t last_mark = 0;    // of the last copy; only the lane's thread uses it
    RequestLimiter in_use{1};  // acquired by the lane's thread
  };
  // A part of a transfer: its begin, which has no buffer; one copy; or its end.
  struct Request {
    BounceBuffer* buffer = nullptr;
    uint64_t use = 0, begin = 0, nbytes = 0;
    uint64_t mark = 0;
    bool is_end = false;
    bool is_truncated = false;  // at the end: not all copies were queued; those that were precede `done`
  };

  void queue(Transfer& transfer);
  uint64_t add_request(Request request);
  void queue_mark(uint64_t number);
  void push(const Request& request);
  Request pop();
  void serve(const TransferPointer& transfer) noexcept;
  void serve(const TransferPointer& transfer, const Request& request);
  static void run(Transfer& transfer, const Request& request, Scratch scratch);
  static void open_gate(Transfer& transfer, const Request& request);

  std::shared_ptr<Driver> driver_;
  IoPool& pool_;
  Stream stream_;
  std::unique_ptr<GatedLink> link_;  // null where the bandwidth is not limited
  PinnedMemory memory_;              // the bounce buffers, and a page for the gates
  std::vector<std::unique_ptr<BounceBuffer>> buffers_;
  uint64_t num_requests_ = 0, num_marks_ = 0, last_queued_mark_ = 0;  // of the issuing thread
  std::shared_ptr<StreamProgress> progress_ = std::make_shared<StreamProgress>();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> requests_;  // still to be served
};

}  // namespace lmswap
