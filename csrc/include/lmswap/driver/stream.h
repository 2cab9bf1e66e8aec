// A stream of a driver, destroyed with its owner.
#pragma once

#include <memory>
#include <utility>

#include "lmswap/driver/driver.h"
#include "lmswap/error.h"

namespace lmswap {

class Stream {
 public:
  explicit Stream(std::shared_ptr<Driver> driver) : driver_(std::move(driver)), handle_(driver_->create_stream()) {}
  ~Stream() { driver_->destroy_stream(handle_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  StreamHandle handle() const { return handle_; }
  void synchronize() const { driver_->synchronize_stream(handle_); }

  // The same for what has failed already: a driver that cannot even wait has stopped copying, and whoever waits for the
  // transfer is told of the first error.
  void drain() const noexcept {
    try {
      synchronize();
    } catch (const Error&) {
    }
  }

 private:
  std::shared_ptr<Driver> driver_;
  StreamHandle handle_;
};

}  // namespace lmswap
