/// @file
/// @brief Checksums of swapped bytes, one for each started MiB.
///
/// A checksum is the sum modulo 2^64 of the 32-bit words, each multiplied by an odd factor of its own; a partial last
/// word is padded with zeros. Words and factors are below 2^32, so these are always detected: one changed word, two
/// changed bits, two swapped words. Any other change, such as the bytes of another block, is missed with a probability
/// of about 2^-60.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace lmswap {

inline constexpr uint64_t kChecksumBytes = 1 << 20;  ///< bytes that one checksum covers

/// @brief Bounds the share of processor time spent on checksums (a token bucket). Thread-safe.
///
/// Unused time accumulates up to that of the last 10 seconds.
class ChecksumBudget {
 public:
  /// @param share processor seconds per second of wall-clock time
  /// @param now current time, seconds of CLOCK_MONOTONIC
  explicit ChecksumBudget(double share, double now) : share_(share), seconds_(share * kMaxSeconds), refilled_(now) {}

  /// @brief Refills the budget up to `now`.
  /// @return whether any of it is left
  bool is_left(double now);

  /// @brief Subtracts processor time; the balance may become negative.
  void spend(double seconds);

 private:
  static constexpr double kMaxSeconds = 10;

  const double share_;
  std::mutex mutex_;
  double seconds_;   // balance; negative where more was spent than available
  double refilled_;  // time of the last refill
};

/// @brief The checksums of one block.
class Checksums {
 public:
  /// @param nbytes size of the block
  /// @param stride 1: all bytes are summed; else, in each MiB, every stride-th stretch of 64 KiB
  /// @param first index of the first stretch that is summed
  /// @param budget charged with the processor time of `update` and `first_change`; may be null
  explicit Checksums(uint64_t nbytes, uint64_t stride = 1, uint64_t first = 0,
                     std::shared_ptr<ChecksumBudget> budget = nullptr)
      : stride_(stride),
        first_(first),
        budget_(std::move(budget)),
        sums_((nbytes + kChecksumBytes - 1) / kChecksumBytes) {}

  /// @brief Computes the checksums of a part. Safe for several threads with different parts.
  /// @param begin offset of the part in the block, a multiple of `kChecksumBytes`
  /// @param nbytes a multiple of `kChecksumBytes`, unless the part is the last
  void update(uint64_t begin, const std::byte* bytes, uint64_t nbytes);

  /// @brief Compares a part, as `update` takes it, with its checksums.
  /// @return the offset of the first MiB that differs; none if all are equal
  [[nodiscard]] std::optional<uint64_t> first_change(uint64_t begin, const std::byte* bytes, uint64_t nbytes) const;

  /// @return the checksums, in the order of offsets
  [[nodiscard]] const std::vector<uint64_t>& sums() const { return sums_; }

 private:
  [[nodiscard]] uint64_t sum(const std::byte* bytes, uint64_t nbytes) const;

  uint64_t stride_, first_;
  std::shared_ptr<ChecksumBudget> budget_;
  std::vector<uint64_t> sums_;
};

}  // namespace lmswap
