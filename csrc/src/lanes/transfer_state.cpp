#include "lmswap/lanes/transfer_state.h"

#include <algorithm>
#include <new>

#include "lmswap/clock.h"

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

void TransferState::begin_part() {
  const std::lock_guard lock(mutex_);
  ++num_parts_;
}

bool TransferState::finish_part() {
  const std::lock_guard lock(mutex_);
  return --num_parts_ == 0;
}

void TransferState::fail(std::string_view text) noexcept {
  const std::lock_guard lock(mutex_);
  if (!error_.empty()) return;
  try {
    error_ = text;
  } catch (const std::bad_alloc&) {
    error_ = "no memory left";  // short enough for a string without allocation
  }
}

void TransferState::fail(const std::exception& error) noexcept {
  const bool is_full = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
  fail(is_full ? "the process was refused host memory for the move. Free host memory, or swap less" : error.what());
}

void TransferState::fail_checksum(const BytesDiffer& error) {
  const std::lock_guard lock(mutex_);
  if (difference_ && difference_->offset_bytes <= error.offset_bytes) return;
  difference_.emplace(error);
  error_ = error.what();
}

bool TransferState::is_failing() const {
  const std::lock_guard lock(mutex_);
  return !error_.empty();
}

void TransferState::set_issued() { set_stage(Stage::kIssued); }

void TransferState::settle() { set_stage(is_failing() ? Stage::kFailed : Stage::kLanded); }

void TransferState::set_stage(Stage stage) {
  // Notified under the lock: a waiting thread may destroy the transfer as soon as the lock is released.
  const std::lock_guard lock(mutex_);
  stage_ = stage;
  is_issued_ |= stage == Stage::kIssued;
  landed_seconds_ = monotonic_seconds();
  changed_.notify_all();
}

TransferState::Stage TransferState::stage() const {
  const std::lock_guard lock(mutex_);
  return stage_;
}

bool TransferState::wait_landed() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return stage_ == Stage::kLanded || stage_ == Stage::kFailed; });
  return stage_ == Stage::kLanded;
}

void TransferState::make_wait(StreamHandle stream, Event& arrival) {
  const StreamId waiting = driver_->stream_id(stream);
  // `done` protects the bytes only once it is recorded: waiting for an event that is not is a no-op.
  const bool must_block = stage() == Stage::kQueued;
  if (must_block) {
    arrival.record(stream);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stage_ != Stage::kQueued; });
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

void TransferState::check_not_failed() {
  const std::lock_guard lock(mutex_);
  if (stage_ != Stage::kFailed) return;
  has_thrown_ = true;
  if (difference_) throw BytesDiffer(*difference_);
  throw TransferError(error_);
}

bool TransferState::precedes(StreamId stream) const {
  const std::lock_guard lock(mutex_);
  return stage_ == Stage::kLanded && waited_by_ == stream;
}

bool TransferState::was_waited_for() const {
  const std::lock_guard lock(mutex_);
  return stage_ == Stage::kLanded && waited_by_.has_value();
}

bool TransferState::is_known() const {
  const std::lock_guard lock(mutex_);
  const bool has_ended = stage_ == Stage::kLanded || stage_ == Stage::kFailed;
  return has_ended && (waited_by_.has_value() || has_thrown_);
}

bool TransferState::has_landed() const { return stage() == Stage::kLanded; }

bool TransferState::is_device_free() const {
  {
    const std::lock_guard lock(mutex_);
    if (stage_ == Stage::kQueued) return false;
    if (stage_ == Stage::kFailed && !is_issued_) return true;
  }
  return is_over(*done, true);  // a failed device runs nothing more
}

bool TransferState::is_finished() const {
  const Stage now = stage();
  if (now == Stage::kFailed) return is_device_free();
  return now == Stage::kLanded && is_over(*done, false);  // if the query fails: the next holder waits for it
}

bool TransferState::has_failed() const { return stage() == Stage::kFailed; }

std::string TransferState::error_text() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

double TransferState::end_seconds() const {
  const std::lock_guard lock(mutex_);
  return std::max(done->seconds(), landed_seconds_);
}

}  // namespace lmswap
