// A private file read and written past the page cache (O_DIRECT), so that swapped bytes really leave memory.
#pragma once

#include <memory>
#include <string>

#include "lmswap/tiers/io_storage.h"
#include "lmswap/tiers/swap_directory.h"

namespace lmswap {

class DirectFile final : public IoStorage {
 public:
  // Makes a file of `nbytes` without a name in `directory`; its room is reserved, so that a full disk shows here.
  // Throws Error(kTier).
  DirectFile(const SwapDirectory& directory, uint64_t nbytes, std::shared_ptr<Faults> faults);

  // A page-aligned pointer is handed to the kernel as it is, but for a last partial page; `bounce`, at least a page, is
  // for the others.
  void write(uint64_t offset, const std::byte* source, uint64_t nbytes, Bounce bounce) override;
  void read(uint64_t offset, std::byte* target, uint64_t nbytes, Bounce bounce) override;

  void read_back(uint64_t offset, std::byte* target, uint64_t nbytes) override;
  void fill(uint64_t offset, uint64_t nbytes, std::byte value) override;
};

}  // namespace lmswap
