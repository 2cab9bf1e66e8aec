/// @file
/// @brief A private file in the swap directory.
#pragma once

#include <memory>

#include "lmswap/tiers/io_storage.h"
#include "lmswap/tiers/swap_directory.h"

namespace lmswap {

/// @brief Base of the unnamed files whose space is reserved.
class SwapFile : public IoStorage {
 public:
  void read_back(uint64_t offset, std::byte* target, uint64_t nbytes) override;
  void fill(uint64_t offset, uint64_t nbytes, std::byte value) override;

 protected:
  /// @brief Creates the file and reserves its space, so that a full disk is detected here.
  /// @param access as in `SwapDirectory::open_unnamed`
  /// @throws TierError if that fails
  SwapFile(const SwapDirectory& directory, int access, uint64_t nbytes, std::shared_ptr<Faults> faults);
};

}  // namespace lmswap
