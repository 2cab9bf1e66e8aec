// Schedules all copies of a schedule with marked idle stretches: positions of swaps, and seconds.
//
// One pass over the runs in simulated time, by the rules of lmswap/planner/simulate.py:
// - a copy out is queued when its buffer becomes idle, or after its last write where the lane is idle;
// - memory is released where a run needs it, of finished copies first the one needed last: a copy that proves needless
//   is cancelled; where all are unfinished, compute stalls for the one that ends first;
// - prefetches are queued in order of need, as early as memory is free until that need and the lane is free.
#pragma once

#include <limits>
#include <vector>

#include "curve.h"
#include "schedule.h"

namespace lmswap::planner {

struct Swap {
  int copy;
  int out_start;  // -1: an earlier host copy is valid
  int release, in_start, first_use;
};

struct Outcome {
  Bytes excess_bytes = 0;  // over the budget, at the worst run, with all swapped buffers non-resident
  int worst_run = -1;
  double seconds = 0;        // where it fits
  double least_seconds = 0;  // of the step, as known when placing ended
};

// Of a step that was aborted because it exceeds `most_seconds`.
inline Outcome too_slow(double least_seconds) {
  return {0, -1, std::numeric_limits<double>::infinity(), least_seconds};
}

class Placer {
 public:
  Placer(const Step& step, const Link& link, Bytes budget_bytes, Bytes tier_bytes);

  // Aborts, with infinite seconds, where the step is certain to take more than `most_seconds`. `swaps`, if given,
  // receives the swaps of the outcome, in order of first_use.
  Outcome place(const Schedule& schedule, double most_seconds, std::vector<Swap>* swaps = nullptr);

 private:
  struct Trip {
    int copy, last_write, after, before;
    Bytes nbytes;
    int earliest;         // run before which its copy out may be queued
    int limit;            // run before which it must be released, or is kept: its next use, or its segment's end
    int return_earliest;  // run before which its copy in may be queued
    bool is_last;         // of this copy of the buffer
    int out_start = -2;   // -2: not queued; -1: needs no copy
    int out_number = -1;  // in order of queueing
    double out_end = 0;
    int release = -1, in_start = -1;
    double in_end = 0;
    bool stays = false;
  };

  void collect(const Schedule& schedule);
  bool step(int at);
  void queue_outs(int at);
  void queue_out(int number, int at);
  void add_outgoing(int number);
  void settle(int at);
  void settle_segment(int at);
  bool make_room(int at);
  bool make_room_without_stall(int at, Bytes wanted, int before);
  void queue_ins(int at);
  void queue_in(Trip& trip, int at);
  int last_needed_of_left(int at);
  [[nodiscard]] int first_to_leave(int at) const;
  void release(int number, int at);
  void stay(int number, int at);
  [[nodiscard]] auto idle_later() const {
    return [this](int a, int b) { return trips_[a].after > trips_[b].after; };
  }
  [[nodiscard]] static bool is_outgoing(const Trip& trip) { return !trip.stays && trip.release < 0; }
  [[nodiscard]] Bytes run_bytes(int at) const;
  [[nodiscard]] double run_end(int at) const;
  double copy(bool is_in, Bytes nbytes);
  void wait(double until) { clock_ = std::max(clock_, until); }
  [[nodiscard]] bool has_good_copy(const Trip& trip) const;

  const Step& step_;
  const Link& link_;
  const Bytes budget_bytes_, tier_bytes_;
  const Schedule* schedule_ = nullptr;
  std::vector<Trip> trips_;       // in order of need
  std::vector<int> by_earliest_;  // trips
  std::vector<int> segment_of_;   // by run
  std::vector<Bytes> resident_;   // by run, with all swapped buffers non-resident
  Curve promised_;                // the same, with early prefetches
  std::vector<int> eligible_;     // heap of trips that may be swapped out: first idle on top
  // Trips queued out. Those that were released or kept since are still there, and are skipped by searches.
  std::vector<int> leaving_;    // in order of their copies; from next_leaving_ on they have not ended
  std::vector<int> copied_;     // heap of trips copied out that may still be in use: first idle on top
  std::vector<int> left_;       // heap of trips copied out and idle: last needed on top
  std::vector<int> away_;       // heap of trips released and not queued in: first needed on top
  std::vector<int> last_trip_;  // by copy, or -1
  std::size_t next_earliest_ = 0, next_leaving_ = 0, next_need_ = 0, next_segment_ = 0;
  int num_outgoing_ = 0;
  int blocked_trip_ = -1, blocked_until_ = -1;
  Bytes now_bytes_ = 0, tier_used_bytes_ = 0, short_bytes_ = 0;
  double clock_ = 0, out_end_ = 0, in_end_ = 0;
  double queued_ = 0;  // when the host has queued everything so far
};

}  // namespace lmswap::planner
