/// @file
/// @brief An owned stream of a driver.
#pragma once

#include <memory>
#include <utility>

#include "lmswap/driver/driver.h"
#include "lmswap/error.h"

namespace lmswap {

/// @brief Owner of a stream; destroys it.
class Stream {
 public:
  explicit Stream(std::shared_ptr<Driver> driver) : driver_(std::move(driver)), handle_(driver_->create_stream()) {}
  ~Stream() { driver_->destroy_stream(handle_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  [[nodiscard]] StreamHandle handle() const { return handle_; }

  /// @brief Blocks until all queued work has finished.
  /// @throws DriverError if the device or the call failed
  void synchronize() const { driver_->synchronize_stream(handle_); }

  /// @brief `synchronize` after a failure, ignoring further errors.
  ///
  /// A driver that cannot even wait has stopped copying, and the transfer reports its first error.
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
