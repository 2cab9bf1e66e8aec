// Which bytes of a contiguous range are held: bookkeeping of offsets only, exact to the page, of no memory in
// particular.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace lmswap {

inline constexpr uint64_t kPageBytes = 4096;  // direct I/O and pinned memory both come in such pages

inline constexpr uint64_t round_to_pages(uint64_t nbytes) {
  return (nbytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

class Arena {
 public:
  explicit Arena(uint64_t capacity_bytes);  // a multiple of the page

  // Holds [offset, offset + nbytes), both rounded to pages; false when any of it is held already or out of range.
  bool take(uint64_t offset, uint64_t nbytes);

  // Holds the smallest free range that nbytes fit in, the first of equals; nothing when there is none.
  std::optional<uint64_t> take_any(uint64_t nbytes);

  void release(uint64_t offset);  // a held range, by the offset it was taken at

  void grow(uint64_t capacity_bytes);  // a multiple of the page
  uint64_t free_bytes_at_end() const;

  uint64_t capacity_bytes() const { return capacity_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }

 private:
  void hold(std::map<uint64_t, uint64_t>::iterator free_range, uint64_t offset, uint64_t nbytes);

  uint64_t capacity_bytes_;
  uint64_t used_bytes_ = 0;
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes; neighbours are merged
  std::map<uint64_t, uint64_t> held_;
};

}  // namespace lmswap
