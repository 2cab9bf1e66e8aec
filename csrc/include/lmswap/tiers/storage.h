// What holds swapped bytes: a stretch of memory or a file. It lives until its last user, also a copy under way.
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

class Storage {
 public:
  explicit Storage(uint64_t nbytes) : nbytes_(nbytes) {}
  virtual ~Storage() = default;
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
  uint64_t nbytes() const { return nbytes_; }

  // Both block, and nothing else may write the bytes meanwhile. `target` is page-aligned memory that the driver made,
  // with room for whole pages.
  virtual void read_back(uint64_t offset, std::byte* target, uint64_t nbytes) = 0;
  virtual void fill(uint64_t offset, uint64_t nbytes, std::byte value) = 0;

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
  void read_back(uint64_t offset, std::byte* target, uint64_t nbytes) override {
    std::memcpy(target, data_ + offset, nbytes);
  }
  void fill(uint64_t offset, uint64_t nbytes, std::byte value) override {
    std::memset(data_ + offset, std::to_integer<int>(value), nbytes);
  }

 private:
  std::shared_ptr<Driver> driver_;
  std::byte* data_;
};

// Spare memory of a device: of the one that computes, or of a peer.
class DeviceMemory final : public Storage {
 public:
  DeviceMemory(std::shared_ptr<Driver> driver, uint64_t nbytes)
      : Storage(nbytes), driver_(std::move(driver)), stream_(driver_), address_(driver_->allocate_device(nbytes)) {}
  ~DeviceMemory() override { driver_->free_device(address_); }
  DeviceAddress at(uint64_t offset) const { return {driver_->device(), address_ + offset}; }

  void read_back(uint64_t offset, std::byte* target, uint64_t nbytes) override {
    driver_->copy_out(target, address_ + offset, nbytes, stream_.handle());
    finish();
  }
  void fill(uint64_t offset, uint64_t nbytes, std::byte value) override {
    driver_->fill(address_ + offset, value, nbytes, stream_.handle());
    finish();
  }

 private:
  // What was queued must not go on behind an error.
  void finish() const {
    try {
      stream_.synchronize();
    } catch (const Error&) {
      stream_.drain();
      throw;
    }
  }

  std::shared_ptr<Driver> driver_;
  Stream stream_;  // made here: where bytes are wiped there is nobody who could be told that it cannot be
  uint64_t address_;
};

}  // namespace lmswap
