#include "lmswap/transfer.h"

#include <algorithm>
#include <utility>

#include "lmswap/clock.h"
#include "lmswap/error.h"

namespace lmswap {
namespace {

// A device that has failed runs nothing any more. Its error is told by the next call that needs it.
bool is_over(const Event& event) {
  try {
    return event.is_finished();
  } catch (const Error&) {
    return true;
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
      start(driver),
      done(driver) {}

void Transfer::begin_part() {
  const std::lock_guard lock(mutex_);
  ++num_parts_;
}

bool Transfer::finish_part() {
  const std::lock_guard lock(mutex_);
  return --num_parts_ == 0;
}

void Transfer::fail(const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (error_.empty()) error_ = text;
}

void Transfer::note(uint64_t begin, const std::byte* bytes, uint64_t nbytes) {
  if (checksums) checksums->note(begin, bytes, nbytes);
}

void Transfer::compare(uint64_t begin, const std::byte* bytes, uint64_t nbytes) {
  const auto change = checksums ? checksums->first_change(begin, bytes, nbytes) : std::nullopt;
  if (!change) return;
  const std::lock_guard lock(mutex_);
  changed_at_ = std::min(*change, changed_at_.value_or(*change));
  error_ = BytesChanged(*changed_at_).what();
}

bool Transfer::is_failing() const {
  const std::lock_guard lock(mutex_);
  return !error_.empty();
}

void Transfer::set_issued() { set_state(State::kIssued); }

void Transfer::settle() { set_state(is_failing() ? State::kFailed : State::kLanded); }

void Transfer::set_state(State state) {
  // Notified under the lock: whoever waits may drop the last reference as soon as it is released.
  const std::lock_guard lock(mutex_);
  state_ = state;
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
  source->done.synchronize();
  return std::max(ready.seconds(), source->end_seconds());
}

bool Transfer::wait_landed() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return state_ == State::kLanded || state_ == State::kFailed; });
  return state_ == State::kLanded;
}

void Transfer::make_wait(StreamHandle stream) const {
  {
    std::unique_lock lock(mutex_);
    // `done` protects the bytes only once it is recorded: waiting for an event that is not is a no-op.
    changed_.wait(lock, [&] { return state_ != State::kQueued; });
    if (state_ == State::kFailed && changed_at_) throw BytesChanged(*changed_at_);
    if (state_ == State::kFailed) throw Error(ErrorKind::kTransfer, error_);
  }
  done.make_wait(stream);
}

bool Transfer::is_device_free() const {
  const State now = state();
  return now == State::kFailed || (now != State::kQueued && is_over(done));
}

bool Transfer::is_finished() const {
  const State now = state();
  return now == State::kFailed || (now == State::kLanded && is_over(done));
}

bool Transfer::has_failed() const { return state() == State::kFailed; }

std::string Transfer::error_text() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

double Transfer::end_seconds() const {
  const std::lock_guard lock(mutex_);
  return std::max(done.seconds(), landed_seconds_);
}

}  // namespace lmswap
