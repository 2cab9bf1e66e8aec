/// @file
/// @brief Host memory that stores bytes compressed.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "lmswap/tiers/io_storage.h"

namespace lmswap {

/// @brief Counts the pages of all storages of a tier. Thread-safe.
class Residency {
 public:
  /// @brief Updates the share of one storage.
  void change(uint64_t before_bytes, uint64_t after_bytes);
  [[nodiscard]] uint64_t now_bytes() const;
  [[nodiscard]] uint64_t peak_bytes() const;

 private:
  mutable std::mutex mutex_;
  uint64_t now_bytes_ = 0, peak_bytes_ = 0;
};

/// @brief Memory that stores chunks encoded (see float_codec.h).
///
/// Each chunk is stored at its own offset, so no allocation is needed; the rest of its range has no pages. Bytes that
/// do not compress take their own size. The memory is a memfd that is never mapped: the kernel counts its pages
/// exactly, they are not part of the process's resident memory, and a forked child copies none.
class CompressedMemory final : public IoStorage {
 public:
  /// @param nbytes capacity in uncompressed bytes
  /// @throws TierError if the memfd cannot be created
  CompressedMemory(uint64_t nbytes, std::shared_ptr<Faults> faults, std::shared_ptr<Residency> residency);
  ~CompressedMemory() override;

  /// @param scratch at least kCodecBytes
  void write(uint64_t offset, const std::byte* source, uint64_t nbytes, Scratch scratch) override;
  void read(uint64_t offset, std::byte* target, uint64_t nbytes, Scratch scratch) override;

  void read_back(uint64_t offset, std::byte* target, uint64_t nbytes) override;
  void fill(uint64_t offset, uint64_t nbytes, std::byte value) override;

 private:
  void write_chunk(uint64_t offset, const std::byte* source, uint64_t nbytes, Scratch scratch);
  void read_chunk(uint64_t offset, std::byte* target, uint64_t nbytes, Scratch scratch);
  void count_pages();

  std::shared_ptr<Residency> residency_;
  // Per page, if a chunk begins there: the number of encoded bytes; kRaw if it is stored unencoded; or kFilled + value
  // if all its bytes have one value.
  std::vector<uint32_t> contents_;
  std::mutex mutex_;
  uint64_t resident_bytes_ = 0;  // as last counted
};

}  // namespace lmswap
