// Faults on demand, for tests of what happens when memory, copies or the disk fail or are late.
//
// A specification is a comma-separated list of  call@n=effect :
//   call    allocate_host, allocate_device, copy_out, copy_in, copy_between (host driver); reserve, write, read (disk,
//           compressed memory)
//   n       1 for the first such call, 2 for the second ...; * for every one; 0.01 for one in a hundred, at random
//   effect  fail          the call fails (disk: EIO, reserve: ENOSPC; compressed memory alike, reserve: ENOMEM)
//           short         half of the bytes are moved, as the kernel may do (reads and writes)
//           flip          a bit is another one: of what is to be copied (host driver's copies), of what was read
//           late:S        the call is S seconds late
//           jitter:S      the call is late by a random time of at most S seconds
// Example: "write@3=fail,read@0.01=short,read@*=jitter:0.002".
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace lmswap {

struct Fault {
  bool fail = false;
  bool is_short = false;
  bool flips = false;
  double late_seconds = 0;
};

class Faults {
 public:
  explicit Faults(const std::string& specification);  // throws Error(kOption)

  // Counts one call and says what shall go wrong with it. Safe from any thread.
  Fault next(const std::string& call);

  // The same, and sleeps when the call is to be late.
  Fault next_after_delay(const std::string& call);

 private:
  struct Rule {
    std::string call;
    uint64_t nth;  // 0: every one, or a share of them
    double share;  // of the calls that it hits
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
