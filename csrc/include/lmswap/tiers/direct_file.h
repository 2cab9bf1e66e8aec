/// @file
/// @brief A private file accessed by direct I/O.
#pragma once

#include <memory>

#include "lmswap/tiers/swap_file.h"

namespace lmswap {

/// @brief An unnamed file that bypasses the page cache (O_DIRECT), so that swapped bytes really leave memory.
class DirectFile final : public SwapFile {
 public:
  /// @throws TierError if the file cannot be created, or its space reserved
  DirectFile(const SwapDirectory& directory, uint64_t nbytes, std::shared_ptr<Faults> faults);

  /// A page-aligned pointer is passed to the kernel, except for a partial last page; other bytes are copied through
  /// `scratch`, of at least a page.
  void write(uint64_t offset, const std::byte* source, uint64_t nbytes, Scratch scratch) override;
  void read(uint64_t offset, std::byte* target, uint64_t nbytes, Scratch scratch) override;
};

}  // namespace lmswap
