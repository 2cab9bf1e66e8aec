// Schedules all copies of a schedule whose idle intervals are marked as swapped or not: positions of swaps, and
// seconds.
//
// One pass over the runs in simulated time, by the rules of lmswap/planner/simulate.py:
// - a swap out is queued when its buffer becomes idle, or after its last write where the lane is idle;
// - memory is released where a run needs it, of finished copies first the one needed last: a swap whose memory no run
//   needs is cancelled; where all are unfinished, compute stalls for the one that ends first;
// - prefetches are queued in order of need, as early as memory is free until that need and the lane is free, or busy
//   for less than `prefetches_ahead` copies more.
#pragma once

#include <limits>
#include <vector>

#include "curve.h"
#include "schedule.h"

namespace lmswap::planner {

struct Swap {
  int version;
  int out_start;  // -1: an earlier host copy is valid
  int release, in_start, first_use;
};

struct Outcome {
  Bytes excess_bytes = 0;  // over the budget, at the worst run, with all swapped buffers non-resident
  int worst_run = -1;
  double seconds = 0;      // where it fits
  double min_seconds = 0;  // of the step, a lower bound, when scheduling ended
};

// The outcome of a step that was aborted because it exceeds `max_seconds`.
inline Outcome too_slow(double min_seconds) { return {0, -1, std::numeric_limits<double>::infinity(), min_seconds}; }

class CopyScheduler {
 public:
  CopyScheduler(const Step& step, const Link& link, Bytes budget_bytes, Bytes tier_bytes, int prefetches_ahead);

  // Aborts, with infinite seconds, where the step is certain to take more than `max_seconds`. `result`, if given,
  // receives the swaps of the outcome, in order of first_use.
  Outcome schedule(const Schedule& schedule, double max_seconds, std::vector<Swap>* result = nullptr);

 private:
  // A swap that is being scheduled.
  struct PendingSwap {
    int version, last_write, last_use, next_use;
    Bytes nbytes;
    int earliest_out;      // run before which its swap out may be queued
    int release_deadline;  // run before which it must be released, or is cancelled: its next use, or its segment's end
    int earliest_in;       // run before which its prefetch may be queued
    bool is_last_of_version;
    bool is_shared;         // see Step
    bool is_persistent;     // its place in the tier is held for good
    bool starts_offloaded;  // it was released in the step before
    bool ends_offloaded;    // it is prefetched in the next step
    int out_start = -2;     // -2: not queued; -1: an earlier host copy is valid
    int out_order = -1;     // among all swaps out
    double out_end = 0;
    int release = -1, in_start = -1;
    double in_end = 0;
    bool is_cancelled = false;  // the buffer stays resident
  };

  void collect(const Schedule& schedule);
  void add_shared(const IdleInterval& interval, int num_runs);
  void end_step(int num_runs);
  void list(int num_runs, std::vector<Swap>& result) const;
  bool run_op(int at);
  void queue_swap_outs(int at);
  bool queue_swap_out_of_start(int at);
  void queue_swap_out(int number, int at);
  void add_pending(int number);
  void cancel_unreleased(int at);
  void end_segment(int at);
  bool evict_for_run(int at);
  bool evict_without_stall(int at, Bytes wanted, int needed_at);
  void queue_prefetches(int at);
  void queue_prefetch(PendingSwap& swap, int at);
  int last_needed_evictable(int at);
  [[nodiscard]] int first_to_be_copied_out(int at) const;
  void release(int number, int at);
  void cancel(int number, int at);
  [[nodiscard]] auto idle_later() const {
    return [this](int a, int b) { return swaps_[a].last_use > swaps_[b].last_use; };
  }
  [[nodiscard]] static bool is_pending(const PendingSwap& swap) { return !swap.is_cancelled && swap.release < 0; }
  [[nodiscard]] Bytes run_bytes(int at) const;
  [[nodiscard]] double run_end(int at) const;
  double copy(bool is_in, Bytes nbytes);
  void wait(double until) { clock_ = std::max(clock_, until); }
  [[nodiscard]] bool has_valid_copy(const PendingSwap& swap) const;

  const Step& step_;
  const Link& link_;
  const Bytes budget_bytes_, tier_bytes_;
  const int prefetches_ahead_;
  const Schedule* schedule_ = nullptr;
  std::vector<PendingSwap> swaps_;    // in order of next use
  std::vector<int> by_earliest_out_;  // indices of swaps
  std::vector<int> segment_of_;       // by run
  std::vector<Bytes> min_bytes_;      // by run, with all swapped buffers non-resident
  Curve reserved_;                    // the same, with prefetched and cancelled ones from then on
  std::vector<int> eligible_;         // heap of swaps that may be queued out: first idle on top
  std::vector<int> idle_at_start_;    // heap of swaps of buffers idle since the step's start: last needed on top
  // Swaps queued out. Those that were released or cancelled since are still there, and are skipped by searches.
  std::vector<int> outgoing_;    // in order of their copies; from next_outgoing_ on they have not ended
  std::vector<int> copied_out_;  // heap of swaps copied out that may still be in use: first idle on top
  std::vector<int> evictable_;   // heap of swaps copied out and idle: last needed on top
  std::vector<int> offloaded_;   // heap of swaps released and not prefetched: first needed on top
  std::vector<int> last_swap_;   // by version, or -1
  std::size_t next_eligible_ = 0, next_outgoing_ = 0, next_need_ = 0, next_segment_ = 0;
  int num_queued_out_ = 0;
  int blocked_swap_ = -1, blocked_until_ = -1;
  Bytes resident_bytes_ = 0, tier_used_bytes_ = 0, excess_bytes_ = 0;
  double clock_ = 0, out_end_ = 0, in_end_ = 0;
  double queued_ = 0;  // when the host has queued everything so far
};

}  // namespace lmswap::planner
