/// @file
/// @brief Allocation of offsets in a contiguous range.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace lmswap {

inline constexpr uint64_t kPageBytes = 4096;  ///< granularity of direct I/O and pinned memory

inline constexpr uint64_t round_to_pages(uint64_t nbytes) {
  return (nbytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

/// @brief Tracks which ranges of a slab are allocated; offsets only, independent of the memory. Not thread-safe.
class Arena {
 public:
  /// @param capacity_bytes a multiple of the page
  explicit Arena(uint64_t capacity_bytes);

  /// @brief Allocates [offset, offset + nbytes), both rounded to pages.
  /// @return false if any of it is allocated already or out of range
  bool take(uint64_t offset, uint64_t nbytes);

  /// @brief Allocates by best fit: the smallest free range that is large enough, the lowest of equals.
  /// @return its offset; none if no range is large enough
  std::optional<uint64_t> take_any(uint64_t nbytes);

  /// @brief Frees an allocated range, by its offset.
  void release(uint64_t offset);

  /// @brief Adds free space at the end.
  /// @param capacity_bytes new capacity, a multiple of the page
  void grow(uint64_t capacity_bytes);

  /// @return the length of the free range at the end
  [[nodiscard]] uint64_t free_bytes_at_end() const;

  [[nodiscard]] uint64_t capacity_bytes() const { return capacity_bytes_; }
  [[nodiscard]] uint64_t used_bytes() const { return used_bytes_; }

 private:
  void hold(std::map<uint64_t, uint64_t>::iterator free_range, uint64_t offset, uint64_t nbytes);

  uint64_t capacity_bytes_;
  uint64_t used_bytes_ = 0;
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes; neighbours are merged
  std::map<uint64_t, uint64_t> held_;
};

}  // namespace lmswap
