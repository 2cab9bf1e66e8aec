// What holds swapped bytes: a stretch of memory or a file. It lives until its last user, also a copy under way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "lmswap/driver.h"

namespace lmswap {

class Storage {
 public:
  explicit Storage(uint64_t nbytes) : nbytes_(nbytes) {}
  virtual ~Storage() = default;
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
  uint64_t nbytes() const { return nbytes_; }

  // Both block, and nothing else may write the bytes meanwhile; `stream` is for what the device has to do. `target` is
  // page-aligned memory that the driver made, with room for whole pages.
  virtual void read_back(uint64_t offset, std::byte* target, uint64_t nbytes, StreamHandle stream) = 0;
  virtual void fill(uint64_t offset, uint64_t nbytes, std::byte value, StreamHandle stream) = 0;

 protected:
  void set_nbytes(uint64_t nbytes) { nbytes_ = nbytes; }

 private:
  uint64_t nbytes_;
};

// Host memory that the driver copies to and from directly; up to `most_bytes` where it grows.
class PinnedMemory final : public Storage {
 public:
  PinnedMemory(std::shared_ptr<Driver> driver, uint64_t nbytes, uint64_t most_bytes = 0)
      : Storage(nbytes),
        driver_(std::move(driver)),
        data_(static_cast<std::byte*>(driver_->allocate_host(nbytes, std::max(nbytes, most_bytes)))) {}
  ~PinnedMemory() override { driver_->free_host(data_); }
  std::byte* data() const { return data_; }

  void grow(uint64_t nbytes) {
    driver_->grow_host(data_, nbytes);
    set_nbytes(nbytes);
  }
  void read_back(uint64_t offset, std::byte* target, uint64_t nbytes, StreamHandle) override {
    std::memcpy(target, data_ + offset, nbytes);
  }
  void fill(uint64_t offset, uint64_t nbytes, std::byte value, StreamHandle) override {
    std::memset(data_ + offset, std::to_integer<int>(value), nbytes);
  }

 private:
  std::shared_ptr<Driver> driver_;
  std::byte* data_;
};

// Spare memory of the device itself.
class DeviceMemory final : public Storage {
 public:
  DeviceMemory(std::shared_ptr<Driver> driver, uint64_t nbytes)
      : Storage(nbytes), driver_(std::move(driver)), address_(driver_->allocate_device(nbytes)) {}
  ~DeviceMemory() override { driver_->free_device(address_); }
  uint64_t address() const { return address_; }

  void read_back(uint64_t offset, std::byte* target, uint64_t nbytes, StreamHandle stream) override {
    driver_->copy_out(target, address_ + offset, nbytes, stream);
    driver_->synchronize_stream(stream);
  }
  void fill(uint64_t offset, uint64_t nbytes, std::byte value, StreamHandle stream) override {
    driver_->fill(address_ + offset, value, nbytes, stream);
    driver_->synchronize_stream(stream);
  }

 private:
  std::shared_ptr<Driver> driver_;
  uint64_t address_;
};

}  // namespace lmswap
