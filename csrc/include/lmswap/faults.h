/// @file
/// @brief Fault injection for tests: allocations, copies and disk requests that fail or are late.
///
/// A specification is a comma-separated list of  call@n=effect :
///   call    allocate_host, allocate_device, copy_out, copy_in, copy_between (host driver); reserve, write, read (disk,
///           compressed memory)
///   n       1 for the first such call, 2 for the second ...; * for every one; 0.01 for one in a hundred, at random
///   effect  fail          the call fails (disk: EIO, reserve: ENOSPC; compressed memory alike, reserve: ENOMEM)
///           short         half of the bytes are moved, as the kernel may do (reads and writes)
///           flip          one bit is inverted: of the source (copies of the host driver), or of what was read
///           late:S        the call is S seconds late
///           jitter:S      the call is late by a random time of at most S seconds
/// Example: "write@3=fail,read@0.01=short,read@*=jitter:0.002".
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace lmswap {

/// @brief The effects on one call.
struct Fault {
  bool fail = false;
  bool is_short = false;
  bool flips = false;
  double late_seconds = 0;
};

/// @brief Injects faults as specified. Thread-safe.
class Faults {
 public:
  /// @param specification the rules; empty: no faults
  /// @throws OptionError if it cannot be parsed
  explicit Faults(const std::string& specification);

  /// @brief Counts one call.
  /// @return the effects of all rules that match it
  Fault next(const std::string& call);

  /// @brief The same, and sleeps for `late_seconds`.
  Fault next_after_delay(const std::string& call);

 private:
  struct Rule {
    std::string call;
    uint64_t nth;  // 0: every call, or a share of them
    double share;  // probability that a call matches
    Fault fault;
    bool is_random;  // late_seconds is an upper bound
  };
  static Rule parse_rule(const std::string& text);

  std::vector<Rule> rules_;
  std::mutex mutex_;
  std::map<std::string, uint64_t> num_calls_;
  std::mt19937 random_{1};
};

}  // namespace lmswap
