#include "lmswap/lanes/transfer.h"

#include <algorithm>
#include <new>
#include <utility>

#include "lmswap/clock.h"
#include "lmswap/error.h"

namespace lmswap {
namespace {

// A query that fails returns `otherwise`; the next call that needs the device throws the error.
bool is_over(const Event& event, bool otherwise) {
  try {
    return event.is_finished();
  } catch (const Error&) {
    return otherwise;
  }
}

}  // namespace

Transfer::Transfer(const std::shared_ptr<Driver>& driver, Direction direction_, int64_t number_, int64_t swap_,
                   uint64_t device_, Block block_)
    : direction(direction_),
      number(number_),
      swap(swap_),
      device(device_),
      block(std::move(block_)),
      queued_seconds(monotonic_seconds()),
      ready(driver),
      done(std::make_shared<Event>(driver)),
      driver_(driver) {}

void Transfer::record_start(StreamHandle lane) {
  start_ = std::make_unique<Event>(driver_);
  start_->record(lane);
}

void Transfer::begin_part() {
  const std::lock_guard lock(mutex_);
  ++num_parts_;
}

bool Transfer::finish_part() {
  const std::lock_guard lock(mutex_);
  return --num_parts_ == 0;
}

void Transfer::fail(std::string_view text) noexcept {
  const std::lock_guard lock(mutex_);
  if (!error_.empty()) return;
  try {
    error_ = text;
  } catch (const std::bad_alloc&) {
    error_ = "no memory left";  // short enough for a string without allocation
  }
}

void Transfer::fail(const std::exception& error) noexcept {
  const bool is_full = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
  fail(is_full ? "the process was refused host memory for the move. Free host memory, or swap less" : error.what());
}

void Transfer::record_checksums(uint64_t begin, const std::byte* bytes, uint64_t nbytes) {
  if (checksums) checksums->update(begin, bytes, nbytes);
}

void Transfer::verify_checksums(uint64_t begin, const std::byte* bytes, uint64_t nbytes) {
  const auto change = checksums ? checksums->first_change(begin, bytes, nbytes) : std::nullopt;
  if (!change) return;
  const std::lock_guard lock(mutex_);
  changed_at_ = std::min(*change, changed_at_.value_or(*change));
  error_ = BytesDiffer(swap, block.nbytes, *changed_at_).what();
}

bool Transfer::is_failing() const {
  const std::lock_guard lock(mutex_);
  return !error_.empty();
}

void Transfer::set_issued() { set_state(State::kIssued); }

void Transfer::settle() { set_state(is_failing() ? State::kFailed : State::kLanded); }

void Transfer::set_state(State state) {
  // Notified under the lock: a waiting thread may destroy the transfer as soon as the lock is released.
  const std::lock_guard lock(mutex_);
  state_ = state;
  is_issued_ |= state == State::kIssued;
  landed_seconds_ = monotonic_seconds();
  changed_.notify_all();
}

Transfer::State Transfer::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

double Transfer::wait_ready() const {
  ready.synchronize();
  if (!source) return ready.seconds();
  source->done->synchronize();
  return std::max(ready.seconds(), source->end_seconds());
}

void Transfer::queue_wait_ready(StreamHandle stream) const {
  ready.make_wait(stream);
  if (source && !source->is_failing()) source->done->make_wait(stream);
}

bool Transfer::wait_landed() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return state_ == State::kLanded || state_ == State::kFailed; });
  return state_ == State::kLanded;
}

void Transfer::make_wait(StreamHandle stream, Event& arrival) {
  const StreamId waiting = driver_->stream_id(stream);
  // `done` protects the bytes only once it is recorded: waiting for an event that is not is a no-op.
  const bool must_block = state() == State::kQueued;
  if (must_block) {
    arrival.record(stream);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return state_ != State::kQueued; });
  }
  check_not_failed();
  if (must_block) {
    done->make_wait(stream);
  } else {
    done->make_wait(stream, arrival);
  }
  const std::lock_guard lock(mutex_);
  waited_by_ = waiting;
}

void Transfer::check_not_failed() const {
  const std::lock_guard lock(mutex_);
  if (state_ == State::kFailed && changed_at_) throw BytesDiffer(swap, block.nbytes, *changed_at_);
  if (state_ == State::kFailed) throw TransferError(error_);
}

bool Transfer::precedes(StreamId stream) const {
  const std::lock_guard lock(mutex_);
  return state_ == State::kLanded && waited_by_ == stream;
}

bool Transfer::was_waited_for() const {
  const std::lock_guard lock(mutex_);
  return state_ == State::kLanded && waited_by_.has_value();
}

bool Transfer::has_landed() const { return state() == State::kLanded; }

bool Transfer::is_device_free() const {
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kQueued) return false;
    if (state_ == State::kFailed && !is_issued_) return true;
  }
  return is_over(*done, true);  // a failed device runs nothing more
}

bool Transfer::is_finished() const {
  const State now = state();
  if (now == State::kFailed) return is_device_free();
  return now == State::kLanded && is_over(*done, false);  // if the query fails: the next holder waits for it
}

bool Transfer::has_failed() const { return state() == State::kFailed; }

std::string Transfer::error_text() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

double Transfer::start_seconds() const {
  if (link_start->seconds() > 0) return link_start->seconds();
  if (start_) return start_->seconds();
  double seconds = ready.seconds();
  for (const auto& event : predecessors_) seconds = std::max(seconds, event->seconds());
  return seconds;
}

double Transfer::end_seconds() const {
  const std::lock_guard lock(mutex_);
  return std::max(done->seconds(), landed_seconds_);
}

}  // namespace lmswap
