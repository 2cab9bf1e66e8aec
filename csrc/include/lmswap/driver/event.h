// An event of a driver, destroyed with its owner.
#pragma once

#include <memory>
#include <utility>

#include "lmswap/driver/driver.h"

namespace lmswap {

class Event {
 public:
  explicit Event(std::shared_ptr<Driver> driver) : driver_(std::move(driver)), handle_(driver_->create_event()) {}
  ~Event() { driver_->destroy_event(handle_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(StreamHandle stream) { driver_->record_event(handle_, stream); }
  void make_wait(StreamHandle stream) const { driver_->wait_event(stream, handle_, 0); }
  void make_wait(StreamHandle stream, const Event& arrival) const {
    driver_->wait_event(stream, handle_, arrival.handle_);
  }
  bool is_finished() const { return driver_->query_event(handle_); }
  void synchronize() const { driver_->synchronize_event(handle_); }
  double seconds() const { return driver_->event_seconds(handle_); }

 private:
  std::shared_ptr<Driver> driver_;
  EventHandle handle_;
};

}  // namespace lmswap
