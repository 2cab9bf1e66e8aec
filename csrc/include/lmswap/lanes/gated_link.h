/// @file
/// @brief An emulated link on a device that can wait for the host, so that no thread of the caller has to.
///
///   arrival stream    ready, source · callback     the bytes are available: they queue for the link
///   link thread       reserves the link chunk by chunk, sleeps until the last chunk would have arrived, opens the gate
///   lane stream       copies · gate · done         at the machine's speed, but done no sooner than on the link
///
/// Arrivals have a stream of their own because the lane's stream is blocked by the copy before: a link that is busy
/// when bytes become available continues with them without a gap. As in GatedBackend, the thread that opens gates makes
/// no driver calls, and keeps nothing alive whose destruction would.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "lmswap/driver/stream.h"
#include "lmswap/lanes/bandwidth_limiter.h"
#include "lmswap/lanes/transfer.h"

namespace lmswap {

/// @brief Delays the `done` events of a lane as the emulated link would. For one thread at a time.
class GatedLink {
 public:
  /// @return a link; null where bandwidth is not limited, or where a stream that waits would block other streams
  /// @throws as the constructor
  static std::unique_ptr<GatedLink> make(const std::shared_ptr<Driver>& driver, const BandwidthLimiter& limiter);

  /// @throws DriverError if the stream or the gate cannot be created
  /// @throws TierError if the system refuses the thread
  GatedLink(std::shared_ptr<Driver> driver, BandwidthLimiter limiter);

  /// @brief Waits for all requests; to be destroyed after the streams that wait for it.
  ~GatedLink();

  /// @brief Requests the link for a transfer; called before its copies are queued.
  void begin(const Transfer& transfer);

  /// @brief Makes `stream` wait until the link has moved all bytes; called behind the copies of the transfer.
  void end(StreamHandle stream);

 private:
  struct Request {
    uint64_t number, nbytes;
    double ready_seconds;
    std::shared_ptr<LinkStart> start;
  };
  // Transfers whose bytes are available; shared with the driver's callbacks, which may outlive the link.
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::list<Request> requests;
    bool is_closing = false;
  };

  void run();
  void serve(const Request& request);

  const std::shared_ptr<Driver> driver_;
  BandwidthLimiter limiter_;
  Stream arrivals_;
  PinnedMemory memory_;   // one page, for the gate
  uint64_t* const gate_;  // number of requests that the link has served
  uint64_t num_begun_ = 0;
  const std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  std::thread thread_;
};

}  // namespace lmswap
