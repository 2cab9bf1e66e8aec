// Device <-> memory pinned on the host, its own or a peer's, by the device's copies on a stream of the lane.
#pragma once

#include <memory>

#include "lmswap/driver/stream.h"
#include "lmswap/lanes/gated_link.h"
#include "lmswap/lanes/mover.h"
#include "lmswap/lanes/pacer.h"

namespace lmswap {

class CopyMover final : public Mover {
 public:
  CopyMover(std::shared_ptr<Driver> driver, Pacer pacer);
  void move(const TransferPointer& transfer) override;
  void complete(const TransferPointer& transfer) noexcept override;
  void drain() noexcept override;

 private:
  void queue_behind(Transfer& transfer, const std::shared_ptr<Event>& event);
  void copy(const Transfer& transfer, uint64_t begin, uint64_t nbytes);

  std::shared_ptr<Driver> driver_;
  Stream stream_;
  std::shared_ptr<Event> last_done_;  // of the lane's last copy; none yet
  std::unique_ptr<GatedLink> link_;   // none: what is paced blocks
  Pacer pacer_;                       // the same link, if so
};

}  // namespace lmswap
