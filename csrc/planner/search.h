// Search for the fastest plan within the budget: starts, repair, and local search over the actions of all gaps, each
// scored by scheduling the whole step and its copies.
#pragma once

#include <cstdint>
#include <limits>
#include <random>
#include <unordered_map>
#include <vector>

#include "schedule_copies.h"
#include "schedule.h"

namespace lmswap::planner {

struct Limits {
  Bytes budget_bytes;
  Bytes tier_bytes;
  Bytes min_swap_bytes;
  bool may_swap, may_redo;
};

struct Rerun {
  int op, position;
};

struct Found {
  bool fits = false;
  double seconds = 0;
  Bytes excess_bytes = 0;  // of the best plan found, where none fits
  std::vector<Rerun> reruns;
  std::vector<Swap> swaps;
  int evaluations = 0;
  int worst_op = -1;  // where that excess is
};

class Search {
 public:
  // Deterministic for equal seeds.
  Search(const Step& step, const Link& link, const Limits& limits, unsigned seed);

  // Stops after `most_evaluations`, or when the step takes at most `target_seconds`.
  Found run(int most_evaluations, double target_seconds);

 private:
  struct Score {
    Bytes excess_bytes = Bytes{1} << 62;
    double seconds = 0;
    bool operator<(const Score& other) const {
      return excess_bytes != other.excess_bytes ? excess_bytes < other.excess_bytes : seconds < other.seconds;
    }
  };
  struct Candidate {
    std::vector<Fate> fates;
    Score score;
  };
  using Mask = std::uint8_t;  // of actions

  void find_gaps();
  void leave_out_small();
  void find_classes();
  [[nodiscard]] bool allows(int gap, Fate fate) const { return (allowed_[gap] >> static_cast<int>(fate) & 1) != 0; }
  [[nodiscard]] bool is_done() const;
  static constexpr double kAnySeconds = std::numeric_limits<double>::infinity();
  Score evaluate(const std::vector<Fate>& fates, double most_seconds = kAnySeconds);
  Outcome place(double most_seconds);
  Found answer();
  void start();
  void improve();
  Score repair(std::vector<Fate>& fates, double swap_price, bool again, int most, double most_seconds = kAnySeconds);
  [[nodiscard]] double redo_seconds(const std::vector<Fate>& fates, int buffer, int depth) const;
  void anneal(Candidate current, int evaluations);
  bool forget(std::vector<Fate>& fates);
  int pick(const Candidate& current);
  void split_classes();
  void prune();

  const Step& step_;
  const Link& link_;
  const Limits limits_;
  Scheduler scheduler_;
  Placer placer_;
  Schedule schedule_;
  std::vector<Mask> allowed_;              // by gap
  std::vector<int> buffer_of_;             // by gap
  std::vector<int> movable_;               // gaps with a choice, largest buffers first
  std::vector<std::vector<int>> classes_;  // movable gaps of equal buffers made by equal ops, in order of time
  std::vector<Fate> plain_;                // keeps all buffers with later uses
  std::vector<Candidate> starts_;
  Candidate best_;
  Outcome last_;
  std::unordered_map<std::uint64_t, Outcome> placed_;  // by key of the schedule
  int evaluations_ = 0, most_evaluations_ = 0;
  double target_seconds_ = 0;
  double free_seconds_ = 0;  // of the step when nothing is evicted
  double copy_price_ = 0;    // seconds a byte, out and in
  const unsigned seed_;
  std::mt19937_64 random_;
};

}  // namespace lmswap::planner
