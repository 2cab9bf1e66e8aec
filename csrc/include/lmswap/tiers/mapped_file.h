/// @file
/// @brief A private file whose bytes are accessed in place.
#pragma once

#include <memory>

#include "lmswap/tiers/swap_file.h"

namespace lmswap {

/// @brief An unnamed file that is mapped: bytes are accessed through the page cache, in place or by requests.
///
/// Pages that in-place access has mapped are given back to the kernel soon, and stay in the page cache: the process has
/// few MiB of all such files resident at a time. Locked memory (mlockall) stays mapped.
///
/// Not by direct I/O, which is not coherent with mappings. In a forked child the mapping is private, as other memory
/// is: what it writes is not seen here, and it keeps the bytes that are freed here. Of pages that it has not written
/// yet, it sees what is written here.
class MappedFile final : public SwapFile {
 public:
  /// @throws TierError if the file cannot be created or mapped, or its space reserved
  MappedFile(const SwapDirectory& directory, uint64_t nbytes, std::shared_ptr<Faults> faults);
  ~MappedFile() override;

  [[nodiscard]] std::byte* data() const override { return data_; }

  void write(uint64_t offset, const std::byte* source, uint64_t nbytes, Scratch scratch) override;
  void read(uint64_t offset, std::byte* target, uint64_t nbytes, Scratch scratch) override;

 private:
  void unmap() noexcept;

  std::byte* data_;
};

}  // namespace lmswap
