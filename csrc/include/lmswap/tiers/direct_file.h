/// @file
/// @brief A private file accessed by direct I/O.
#pragma once

#include <memory>
#include <string>

#include "lmswap/tiers/io_storage.h"
#include "lmswap/tiers/swap_directory.h"

namespace lmswap {

/// @brief An unnamed file that bypasses the page cache (O_DIRECT), so that swapped bytes really leave memory.
class DirectFile final : public IoStorage {
 public:
  /// @brief Creates the file and reserves its space, so that a full disk is detected here.
  /// @throws TierError if that fails
  DirectFile(const SwapDirectory& directory, uint64_t nbytes, std::shared_ptr<Faults> faults);

  /// A page-aligned pointer is passed to the kernel, except for a partial last page; other bytes are copied through
  /// `scratch`, of at least a page.
  void write(uint64_t offset, const std::byte* source, uint64_t nbytes, Scratch scratch) override;
  void read(uint64_t offset, std::byte* target, uint64_t nbytes, Scratch scratch) override;

  void read_back(uint64_t offset, std::byte* target, uint64_t nbytes) override;
  void fill(uint64_t offset, uint64_t nbytes, std::byte value) override;
};

}  // namespace lmswap
