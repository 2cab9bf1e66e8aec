/// @file
/// @brief Transfers that may still access released blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <vector>

#include "lmswap/lanes/transfer.h"

namespace lmswap {

/// @brief An index of the transfers of one slab by the bytes that they access. Not thread-safe.
///
/// A step may release thousands of blocks, so lookups by block take logarithmic time.
class PendingTransfers {
 public:
  void add(const TransferPointer& transfer);

  /// @brief Removes a transfer that was added.
  void remove(const TransferPointer& transfer);

  /// @brief Removes and returns the transfers whose bytes all lie within the block.
  std::vector<TransferPointer> take_within(const Block& block);

  /// @brief Removes and returns finished transfers in the order in which they were added, up to the first unfinished,
  /// if there are twice as many as after the last removal: polling each of them at each copy would be quadratic, as a
  /// host that is a step ahead has a step's copies pending.
  std::vector<TransferPointer> take_finished_if_many();

  /// @brief Removes and returns all transfers in the order in which they were added.
  std::vector<TransferPointer> take_all();

  /// @return the transfers that access bytes of the block
  [[nodiscard]] std::vector<TransferPointer> overlapping(const Block& block) const;

  [[nodiscard]] size_t size() const { return entries_.size(); }

 private:
  static constexpr size_t kFew = 64;
  struct Entry;
  using Entries = std::list<Entry>;
  using ByOffset = std::multimap<uint64_t, Entries::iterator>;
  struct Entry {
    TransferPointer transfer;
    ByOffset::iterator position;
  };

  Entries entries_;  // in the order in which they were added
  ByOffset by_offset_;
  uint64_t longest_bytes_ = 0;
  size_t max_ = kFew;  // with more, finished ones are removed
};

}  // namespace lmswap
