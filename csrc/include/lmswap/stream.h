// A stream of a driver, destroyed with its owner.
#pragma once

#include <memory>
#include <utility>

#include "lmswap/driver.h"

namespace lmswap {

class Stream {
 public:
  explicit Stream(std::shared_ptr<Driver> driver) : driver_(std::move(driver)), handle_(driver_->create_stream()) {}
  ~Stream() { driver_->destroy_stream(handle_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  StreamHandle handle() const { return handle_; }
  void synchronize() const { driver_->synchronize_stream(handle_); }

 private:
  std::shared_ptr<Driver> driver_;
  StreamHandle handle_;
};

}  // namespace lmswap
