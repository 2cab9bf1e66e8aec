// An emulated link on a device that waits for the host, so that no thread of the caller's has to.
//
//   stream of arrivals   ready, source · callback     the bytes are there: they begin to queue for the link
//   the link's thread    takes the link chunk by chunk, sleeps until it would have brought the last, opens the gate
//   stream of the lane   copies · gate · done         at the machine's own speed, but over no sooner than the link's
//
// The arrivals have a stream of their own as that of the lane is held up by the copy before: a link that is busy when
// bytes come goes on with them without a pause. As in GatedMover the thread that opens gates calls nothing of the
// driver's, and it keeps nothing alive whose end would.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "lmswap/driver/stream.h"
#include "lmswap/lanes/pacer.h"
#include "lmswap/lanes/transfer.h"

namespace lmswap {

class GatedLink {
 public:
  // None where lanes are not paced, or where a device that waits would hold up all of its streams.
  static std::unique_ptr<GatedLink> make(const std::shared_ptr<Driver>& driver, const Pacer& pacer);

  GatedLink(std::shared_ptr<Driver> driver, Pacer pacer);
  ~GatedLink();  // after the streams that wait for it

  // Of one transfer, before and behind its copies: `stream` goes on when the link has brought all of its bytes.
  void begin(const Transfer& transfer);
  void end(StreamHandle stream);

 private:
  struct Passage {
    uint64_t number, nbytes;
    double ready_seconds;
    std::shared_ptr<LinkStart> start;
  };
  // The passages that have come to the link; the driver's callbacks may outlive it.
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::list<Passage> passages;
    bool is_closing = false;
  };

  void run();
  void bring(const Passage& passage);

  const std::shared_ptr<Driver> driver_;
  Pacer pacer_;
  Stream arrivals_;
  PinnedMemory memory_;   // a page for the gate
  uint64_t* const gate_;  // how many passages the link has brought
  uint64_t num_begun_ = 0;
  const std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  std::thread thread_;
};

}  // namespace lmswap
