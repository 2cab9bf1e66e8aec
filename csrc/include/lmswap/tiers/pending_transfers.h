/// @file
/// @brief Transfers that may still access released blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <utility>
#include <vector>

#include "lmswap/lanes/transfer.h"

namespace lmswap {

/// @brief An index of transfers by the bytes of the tier that they access. Not thread-safe.
///
/// A step may release thousands of blocks, so lookups by block take logarithmic time.
class PendingTransfers {
 public:
  void add(const TransferPointer& transfer);

  /// @brief Removes and returns the transfers whose bytes all lie within the block.
  std::vector<TransferPointer> take_within(const Block& block);

  /// @brief Removes and returns transfers in the order in which they were added, up to the first that `stays`.
  std::vector<TransferPointer> take_until(const std::function<bool(const TransferPointer&)>& stays);

  /// @return the transfers that access bytes of the block
  [[nodiscard]] std::vector<TransferPointer> overlapping(const Block& block) const;

  [[nodiscard]] bool any_of(const std::function<bool(const TransferPointer&)>& predicate) const;
  [[nodiscard]] size_t size() const { return entries_.size(); }

 private:
  struct Entry;
  using Entries = std::list<Entry>;
  using ByOffset = std::multimap<std::pair<const Storage*, uint64_t>, Entries::iterator>;
  struct Entry {
    TransferPointer transfer;
    ByOffset::iterator position;
  };

  Entries entries_;  // in the order in which they were added
  ByOffset by_offset_;
  uint64_t longest_bytes_ = 0;
};

}  // namespace lmswap
