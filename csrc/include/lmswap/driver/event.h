/// @file
/// @brief An owned event of a driver.
#pragma once

#include <memory>
#include <utility>

#include "lmswap/driver/driver.h"

namespace lmswap {

/// @brief Owner of an event; destroys it. Functions throw DriverError if the driver call fails.
class Event {
 public:
  explicit Event(std::shared_ptr<Driver> driver) : driver_(std::move(driver)), handle_(driver_->create_event()) {}
  ~Event() { driver_->destroy_event(handle_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  /// @brief Marks the end of what `stream` holds now.
  void record(StreamHandle stream) { driver_->record_event(handle_, stream); }
  /// @brief Makes `stream` wait for the event, which must have been recorded.
  void make_wait(StreamHandle stream) const { driver_->wait_event(stream, handle_, 0); }
  /// @brief The same, and records `arrival` when the stream reaches the wait.
  void make_wait(StreamHandle stream, const Event& arrival) const {
    driver_->wait_event(stream, handle_, arrival.handle_);
  }
  [[nodiscard]] bool is_finished() const { return driver_->query_event(handle_); }
  /// @brief Blocks until the event has happened.
  void synchronize() const { driver_->synchronize_event(handle_); }
  /// @return when the finished event happened, seconds of CLOCK_MONOTONIC
  [[nodiscard]] double seconds() const { return driver_->event_seconds(handle_); }

 private:
  std::shared_ptr<Driver> driver_;
  EventHandle handle_;
};

}  // namespace lmswap
