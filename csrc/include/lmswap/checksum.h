// Are these still the same bytes? Sums that tell, one for each begun MiB.
//
// A sum is that of the 32-bit words, each times an odd number of its own, modulo 2^64; what is missing at the end
// counts as zeros. Words and factors are below 2^32, so that none of these goes unseen: one word that changed, two
// bits, two words that changed places. Anything else, such as another block's bytes, has one chance in some 2^60.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace lmswap {

inline constexpr uint64_t kChecksumBytes = 1 << 20;  // of one sum

class Checksums {
 public:
  // Of all of `nbytes`; or, of each MiB, of every stride-th stretch of 64 KiB, from that numbered `first` on.
  explicit Checksums(uint64_t nbytes, uint64_t stride = 1, uint64_t first = 0)
      : stride_(stride), first_(first), sums_((nbytes + kChecksumBytes - 1) / kChecksumBytes) {}

  // Of the bytes from `begin` on, which begin a MiB and end one, or the whole. Threads may note different parts at
  // once.
  void note(uint64_t begin, const std::byte* bytes, uint64_t nbytes);

  // Where the first MiB begins that was noted otherwise; nothing if all bytes are as they were.
  std::optional<uint64_t> first_change(uint64_t begin, const std::byte* bytes, uint64_t nbytes) const;

  const std::vector<uint64_t>& sums() const { return sums_; }

 private:
  uint64_t sum(const std::byte* bytes, uint64_t nbytes) const;

  uint64_t stride_, first_;
  std::vector<uint64_t> sums_;
};

}  // namespace lmswap
