// Search for the fastest plan within the budget: starts, repair, and local search over the actions of all gaps, each
// scored by scheduling the whole step and its copies.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <random>
#include <unordered_map>
#include <vector>

#include "schedule.h"
#include "schedule_copies.h"

namespace lmswap::planner {

struct Limits {
  Bytes budget_bytes;
  Bytes tier_bytes;
  Bytes min_swap_bytes;
  bool may_swap, may_recompute;
  int prefetches_ahead = 0;  // see CopyScheduler
};

// Those of a lower bound on the step's seconds, see lmswap/ir/certificate.py.
struct Prices {
  std::vector<int> cuts;        // ops
  std::vector<double> memory;   // by cut: seconds a byte
  std::vector<double> out, in;  // by zone, one more than cuts: seconds a second of the lane
};

struct Recompute {
  int op, position;
};

struct SearchResult {
  bool fits = false;
  double seconds = 0;
  Bytes excess_bytes = 0;  // of the best plan found, where none fits
  std::vector<Recompute> recomputes;
  std::vector<Swap> swaps;
  int evaluations = 0;
  int worst_op = -1;  // where that excess is
};

class Search {
 public:
  // Deterministic for equal seeds.
  Search(const Step& step, const Link& link, const Limits& limits, Prices prices, unsigned seed);

  // Stops after `max_evaluations`, or when the step takes at most `target_seconds`, or exceeds the budget by at most
  // `tolerated_excess_bytes`: enough to refuse it.
  SearchResult run(int max_evaluations, double target_seconds, Bytes tolerated_excess_bytes = 0);

 private:
  struct Score {
    Bytes excess_bytes = Bytes{1} << 62;
    double seconds = 0;
    bool operator<(const Score& other) const {
      return excess_bytes != other.excess_bytes ? excess_bytes < other.excess_bytes : seconds < other.seconds;
    }
  };
  struct Candidate {
    std::vector<Action> actions;
    Score score;
  };
  using Mask = std::uint8_t;  // of actions

  void find_gaps();
  [[nodiscard]] bool may_recompute(int buffer, int next_use) const;
  void exclude_small();
  void find_classes();
  [[nodiscard]] bool allows(int gap, Action action) const {
    return (allowed_[gap] >> static_cast<int>(action) & 1) != 0;
  }
  [[nodiscard]] bool is_done() const;
  // The op that makes a buffer; the first that uses it where it is persistent.
  [[nodiscard]] int begins_at(int buffer) const {
    return step_.is_persistent(buffer) ? step_.uses[buffer][0] : step_.producer[buffer];
  }
  static constexpr double kAnySeconds = std::numeric_limits<double>::infinity();
  Score evaluate(const std::vector<Action>& actions, double max_seconds = kAnySeconds);
  [[nodiscard]] const std::vector<Action>& with_fetches(const std::vector<Action>& actions);
  Outcome schedule_copies(double max_seconds);
  SearchResult build_result();
  void start();
  [[nodiscard]] double stall_seconds(int gap, Action action) const;
  void start_evenly();
  void start_by_prices();
  void price_actions();
  [[nodiscard]] double priced_seconds(int gap, Action action) const;
  [[nodiscard]] bool evicts(const IdleInterval& interval, Action now, Action action, bool evict_again) const;
  void improve();
  Score repair(std::vector<Action>& actions, double swap_weight, bool evict_again, int max_tries,
               double max_seconds = kAnySeconds);
  [[nodiscard]] double recompute_seconds(const std::vector<Action>& actions, int buffer, int depth) const;
  void anneal(Candidate current, int evaluations);
  bool reset_around_op(std::vector<Action>& actions);
  bool exchange(std::vector<Action>& actions);
  int pick_gap(const Candidate& current);
  void split_classes();
  void prune();

  const Step& step_;
  const Link& link_;
  const Limits limits_;
  const Prices prices_;
  Scheduler scheduler_;
  CopyScheduler copy_scheduler_;
  Schedule schedule_;
  std::vector<int> fetched_;                             // buffers
  std::vector<Action> with_fetches_;                     // the last result of the function
  std::vector<Mask> allowed_;                            // by gap
  std::vector<int> buffer_of_;                           // by gap
  std::vector<int> evictable_gaps_;                      // gaps with a choice of actions, largest buffers first
  std::vector<std::array<double, kNumActions>> priced_;  // by gap and action: `priced_seconds`; empty without prices
  std::vector<std::vector<int>> classes_;  // evictable gaps of equal buffers made by equal ops, in order of time
  std::vector<std::size_t> class_of_;      // by evictable gap
  std::vector<Action> default_actions_;    // keeps all buffers with later uses
  std::vector<Candidate> starts_;
  Candidate best_;
  Outcome last_outcome_;
  std::unordered_map<std::uint64_t, Outcome> outcomes_;  // by key of the schedule
  int evaluations_ = 0, max_evaluations_ = 0;
  bool is_cyclic_ = false;  // gaps over the step's end can be swapped
  double target_seconds_ = 0;
  Bytes tolerated_excess_bytes_ = 0;
  std::vector<double> op_starts_;     // without copies or recomputes; the last is the step's end
  double compute_seconds_ = 0;        // of the step when nothing is evicted
  double copy_seconds_per_byte_ = 0;  // out and in
  const unsigned seed_;
  std::mt19937_64 random_;
};

}  // namespace lmswap::planner
