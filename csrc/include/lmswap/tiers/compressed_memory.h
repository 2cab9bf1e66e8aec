// Host memory that holds bytes encoded, chunk by chunk: see float_codec.h.
//
// A chunk lies at the begin of its own place, so no room has to be found for it; of the rest of the place there are no
// pages. Bytes that do not get fewer take what they are. The memory is a file without a disk (memfd) that nobody maps:
// the kernel counts its pages exactly, none of them is part of the process's resident memory, and a forked child copies
// none.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "lmswap/tiers/io_storage.h"

namespace lmswap {

// Of all storages of a tier: what their pages are.
class Residency {
 public:
  void change(uint64_t before_bytes, uint64_t after_bytes);
  uint64_t now_bytes() const;
  uint64_t peak_bytes() const;

 private:
  mutable std::mutex mutex_;
  uint64_t now_bytes_ = 0, peak_bytes_ = 0;
};

class CompressedMemory final : public IoStorage {
 public:
  // Throws Error(kTier).
  CompressedMemory(uint64_t nbytes, std::shared_ptr<Faults> faults, std::shared_ptr<Residency> residency);
  ~CompressedMemory() override;

  // `bounce` has room for a chunk's encoding, kCodecBytes.
  void write(uint64_t offset, const std::byte* source, uint64_t nbytes, Bounce bounce) override;
  void read(uint64_t offset, std::byte* target, uint64_t nbytes, Bounce bounce) override;

  void read_back(uint64_t offset, std::byte* target, uint64_t nbytes) override;
  void fill(uint64_t offset, uint64_t nbytes, std::byte value) override;

 private:
  void write_chunk(uint64_t offset, const std::byte* source, uint64_t nbytes, Bounce bounce);
  void read_chunk(uint64_t offset, std::byte* target, uint64_t nbytes, Bounce bounce);
  void count_pages();

  std::shared_ptr<Residency> residency_;
  // What lies at a page, where a chunk begins there: so many encoded bytes; kRaw, the bytes themselves; or that all of
  // them have one value, kFilled + value.
  std::vector<uint32_t> contents_;
  std::mutex mutex_;
  uint64_t resident_bytes_ = 0;  // as last counted
};

}  // namespace lmswap
