// Are these still the same bytes? Sums that tell, one for each begun MiB.
//
// A sum is that of the 32-bit words, each times an odd number of its own, modulo 2^64; what is missing at the end
// counts as zeros. Words and factors are below 2^32, so that none of these goes unseen: one word that changed, two
// bits, two words that changed places. Anything else, such as another block's bytes, has one chance in some 2^60.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace lmswap {

inline constexpr uint64_t kChecksumBytes = 1 << 20;  // of one sum

// What share of the processor's time sums may take. Where nothing was summed for a while, as much as in the last
// seconds may be made up for.
class SumBudget {
 public:
  explicit SumBudget(double share, double now) : share_(share), seconds_(share * kMostSeconds), refilled_(now) {}

  bool is_left(double now);
  void spend(double seconds);

 private:
  static constexpr double kMostSeconds = 10;

  const double share_;
  std::mutex mutex_;
  double seconds_;   // that may be spent; less than none where more was
  double refilled_;  // when
};

class Checksums {
 public:
  // Of all of `nbytes`; or, of each MiB, of every stride-th stretch of 64 KiB, from that numbered `first` on. The time
  // that it takes is spent of `budget`, if there is one.
  explicit Checksums(uint64_t nbytes, uint64_t stride = 1, uint64_t first = 0,
                     std::shared_ptr<SumBudget> budget = nullptr)
      : stride_(stride),
        first_(first),
        budget_(std::move(budget)),
        sums_((nbytes + kChecksumBytes - 1) / kChecksumBytes) {}

  // Of the bytes from `begin` on, which begin a MiB and end one, or the whole. Threads may note different parts at
  // once.
  void note(uint64_t begin, const std::byte* bytes, uint64_t nbytes);

  // Where the first MiB begins that was noted otherwise; nothing if all bytes are as they were.
  std::optional<uint64_t> first_change(uint64_t begin, const std::byte* bytes, uint64_t nbytes) const;

  const std::vector<uint64_t>& sums() const { return sums_; }

 private:
  uint64_t sum(const std::byte* bytes, uint64_t nbytes) const;

  uint64_t stride_, first_;
  std::shared_ptr<SumBudget> budget_;
  std::vector<uint64_t> sums_;
};

}  // namespace lmswap
