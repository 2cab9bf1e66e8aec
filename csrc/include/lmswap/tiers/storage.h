/// @file
/// @brief Memory or a file that holds swapped bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "lmswap/driver/driver.h"
#include "lmswap/driver/stream.h"
#include "lmswap/error.h"

namespace lmswap {

/// @brief The memory of one slab; kept alive by blocks and running copies.
class Storage {
 public:
  explicit Storage(uint64_t nbytes) : nbytes_(nbytes) {}
  virtual ~Storage() = default;
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
  [[nodiscard]] uint64_t nbytes() const { return nbytes_; }

  /// @return the address of the bytes, where they can be accessed in place; else null
  [[nodiscard]] virtual std::byte* data() const { return nullptr; }

  /// @brief Blocks until nothing that the caller has queued accesses the bytes in place. Errors are ignored.
  virtual void wait_for_kernels() noexcept {}

  /// @brief Reads bytes into host memory; blocks. Nothing may write them meanwhile.
  /// @param target page-aligned memory of `Driver::allocate_host`, with room for whole pages
  /// @throws DriverError, TransferError if the bytes cannot be read
  virtual void read_back(uint64_t offset, std::byte* target, uint64_t nbytes) = 0;

  /// @brief Sets bytes to `value`; blocks. Nothing may access them meanwhile.
  /// @throws DriverError, TransferError if the bytes cannot be written
  virtual void fill(uint64_t offset, uint64_t nbytes, std::byte value) = 0;

 protected:
  void set_nbytes(uint64_t nbytes) { nbytes_ = nbytes; }

 private:
  uint64_t nbytes_;
};

/// @brief Pinned host memory.
class PinnedMemory : public Storage {
 public:
  /// @param max_bytes the most that it may grow to, where the driver supports that; 0: it does not grow
  /// @throws DriverError if the memory cannot be allocated
  PinnedMemory(std::shared_ptr<Driver> driver, uint64_t nbytes, uint64_t max_bytes = 0)
      : Storage(nbytes),
        driver_(std::move(driver)),
        data_(static_cast<std::byte*>(driver_->allocate_host(nbytes, std::max(nbytes, max_bytes)))) {}
  ~PinnedMemory() override { driver_->free_host(data_); }
  [[nodiscard]] std::byte* data() const override { return data_; }

  /// @brief Grows in place; unchanged on failure.
  /// @throws DriverError if the memory cannot be extended
  void grow(uint64_t nbytes) {
    driver_->grow_host(data_, nbytes);
    set_nbytes(nbytes);
  }
  void read_back(uint64_t offset, std::byte* target, uint64_t nbytes) override {
    std::memcpy(target, data_ + offset, nbytes);
  }
  void fill(uint64_t offset, uint64_t nbytes, std::byte value) override {
    std::memset(data_ + offset, std::to_integer<int>(value), nbytes);
  }

 protected:
  PinnedMemory(std::shared_ptr<Driver> driver, uint64_t nbytes, void* data)
      : Storage(nbytes), driver_(std::move(driver)), data_(static_cast<std::byte*>(data)) {}
  [[nodiscard]] Driver& driver() const { return *driver_; }

 private:
  std::shared_ptr<Driver> driver_;
  std::byte* data_;
};

/// @brief Pinned host memory for tensors of the device, which the caller's kernels access in place.
class AddressableMemory final : public PinnedMemory {
 public:
  /// @throws DriverError if the memory cannot be allocated
  AddressableMemory(const std::shared_ptr<Driver>& driver, uint64_t nbytes)
      : PinnedMemory(driver, nbytes, driver->allocate_addressable(nbytes)) {}

  /// @return whether the device addresses the bytes as the host does; a tensor has only one address
  /// @throws DriverError if the device has no address for them
  [[nodiscard]] bool has_one_address() const {
    return driver().device_address(data()) == reinterpret_cast<uint64_t>(data());
  }
  void wait_for_kernels() noexcept override { driver().synchronize_device(); }
};

/// @brief Memory of a device: of the one that computes, or of a peer.
class DeviceMemory final : public Storage {
 public:
  /// @throws DriverError if the memory cannot be allocated
  DeviceMemory(std::shared_ptr<Driver> driver, uint64_t nbytes)
      : Storage(nbytes), driver_(std::move(driver)), stream_(driver_), address_(driver_->allocate_device(nbytes)) {}
  ~DeviceMemory() override { driver_->free_device(address_); }
  [[nodiscard]] DeviceAddress at(uint64_t offset) const { return {driver_->device(), address_ + offset}; }

  void read_back(uint64_t offset, std::byte* target, uint64_t nbytes) override {
    driver_->copy_out(target, address_ + offset, nbytes, stream_.handle());
    finish();
  }
  void fill(uint64_t offset, uint64_t nbytes, std::byte value) override {
    driver_->fill(address_ + offset, value, nbytes, stream_.handle());
    finish();
  }

 private:
  // Queued work must not continue after an error was thrown.
  void finish() const {
    try {
      stream_.synchronize();
    } catch (const Error&) {
      stream_.drain();
      throw;
    }
  }

  std::shared_ptr<Driver> driver_;
  Stream stream_;  // created early: when bytes are wiped, a failure to create it could not be thrown
  uint64_t address_;
};

}  // namespace lmswap
