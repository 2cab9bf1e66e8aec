#include "lmswap/lanes/transfer.h"

#include <algorithm>
#include <utility>

#include "lmswap/clock.h"
#include "lmswap/error.h"

namespace lmswap {

Transfer::Transfer(const std::shared_ptr<Driver>& driver, Direction direction_, int64_t number_, int64_t swap_,
                   uint64_t device_, Block block_)
    : direction(direction_),
      number(number_),
      swap(swap_),
      device(device_),
      block(std::move(block_)),
      queued_seconds(monotonic_seconds()),
      ready(driver),
      state(driver),
      driver_(driver) {}

void Transfer::record_start(StreamHandle lane) {
  start_ = std::make_unique<Event>(driver_);
  start_->record(lane);
}

void Transfer::record_checksums(uint64_t begin, const std::byte* bytes, uint64_t nbytes) {
  if (checksums) checksums->update(begin, bytes, nbytes);
}

void Transfer::verify_checksums(uint64_t begin, const std::byte* bytes, uint64_t nbytes) {
  const auto change = checksums ? checksums->first_change(begin, bytes, nbytes) : std::nullopt;
  if (change) state.fail_checksum(BytesDiffer(swap, block.nbytes, *change));
}

double Transfer::wait_ready() const {
  ready.synchronize();
  if (!source) return ready.seconds();
  source->state.done->synchronize();
  return std::max(ready.seconds(), source->state.end_seconds());
}

void Transfer::queue_wait_ready(StreamHandle stream) const {
  ready.make_wait(stream);
  if (source && !source->state.is_failing()) source->state.done->make_wait(stream);
}

double Transfer::start_seconds() const {
  if (link_start->seconds() > 0) return link_start->seconds();
  if (start_) return start_->seconds();
  double seconds = ready.seconds();
  for (const auto& event : predecessors_) seconds = std::max(seconds, event->seconds());
  return seconds;
}

}  // namespace lmswap
