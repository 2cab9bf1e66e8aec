// A private file read and written past the page cache (O_DIRECT), so that swapped bytes really leave memory.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "lmswap/faults.h"
#include "lmswap/tiers/arena.h"
#include "lmswap/tiers/storage.h"
#include "lmswap/tiers/swap_directory.h"

namespace lmswap {

// Page-aligned memory that bytes pass through when the caller's pointer is not page-aligned. At least a page.
using Bounce = std::span<std::byte>;

class DirectFile final : public Storage {
 public:
  // Makes a file of `nbytes` without a name in `directory`; its room is reserved, so that a full disk shows here.
  // Throws Error(kTier).
  DirectFile(const SwapDirectory& directory, uint64_t nbytes, std::shared_ptr<Faults> faults);
  ~DirectFile() override;

  // Move nbytes at `offset`, a multiple of the page; any number may run at once. Throw Error(kTransfer). A page-aligned
  // pointer is handed to the kernel as it is, but for a last partial page.
  void write(uint64_t offset, const std::byte* source, uint64_t nbytes, Bounce bounce);
  void read(uint64_t offset, std::byte* target, uint64_t nbytes, Bounce bounce);

  void read_back(uint64_t offset, std::byte* target, uint64_t nbytes) override;
  void fill(uint64_t offset, uint64_t nbytes, std::byte value) override;

 private:
  void write_pages(uint64_t offset, const std::byte* source, uint64_t nbytes);
  void read_pages(uint64_t offset, std::byte* target, uint64_t nbytes);

  std::shared_ptr<Faults> faults_;
  int descriptor_;
};

}  // namespace lmswap
