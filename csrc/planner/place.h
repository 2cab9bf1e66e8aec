// When does each buffer leave and come back? A schedule whose idle stretches are marked -> times of all copies,
// seconds.
//
// One pass over the runs in simulated time, by the rules of lmswap/plan/simulate.py:
// - a copy out is queued when its buffer falls idle, or after its last write where the lane has nothing to do;
// - memory is released where a run needs it, first what has left and is wanted back last: a copy that proves needless
//   cancels itself; what must stall for room waits for the copy that ends first;
// - copies in are queued in order of need, as early as there is room until that need, but not before the lane is free.
#pragma once

#include <limits>
#include <vector>

#include "curve.h"
#include "schedule.h"

namespace lmswap::planner {

struct Swap {
  int copy;
  int out_start;  // -1: an earlier copy out is still good
  int release, in_start, first_use;
};

struct Outcome {
  Bytes excess_bytes = 0;  // over the budget, at the worst run, when all that leaves is away as long as it can be
  int worst_run = -1;
  double seconds = 0;        // where it fits
  double least_seconds = 0;  // of the step, as known when placing ended
};

// Of a step that was given up because it takes more than it may.
inline Outcome too_slow(double least_seconds) {
  return {0, -1, std::numeric_limits<double>::infinity(), least_seconds};
}

class Placer {
 public:
  Placer(const Step& step, const Link& link, Bytes budget_bytes, Bytes tier_bytes);

  // Gives up, with infinitely many seconds, where the step is sure to take more than `most_seconds`. `swaps`, if given,
  // gets what the outcome's seconds need, in order of first_use.
  Outcome place(const Schedule& schedule, double most_seconds, std::vector<Swap>* swaps = nullptr);

 private:
  struct Trip {
    int copy, last_write, after, before;
    Bytes nbytes;
    int earliest;         // run before which its copy out may be queued
    int limit;            // run before which it must have been released, or stay: its next use, or its segment's end
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
  std::vector<Bytes> resident_;   // by run, while all that leaves is away
  Curve promised_;                // the same, with what has come back early
  std::vector<int> eligible_;     // heap of trips that may leave: first idle on top
  // Trips queued out. Those that were released since, or stay, are still there: whoever looks for one passes over them.
  std::vector<int> leaving_;    // in order of their copies; from next_leaving_ on they have not ended
  std::vector<int> copied_;     // heap of what has left and may still be in use: first idle on top
  std::vector<int> left_;       // heap of what has left and is idle: last needed on top
  std::vector<int> away_;       // heap of trips released and not queued in: first needed on top
  std::vector<int> last_trip_;  // by copy, or -1
  std::size_t next_earliest_ = 0, next_leaving_ = 0, next_need_ = 0, next_segment_ = 0;
  int num_outgoing_ = 0;
  int blocked_trip_ = -1, blocked_until_ = -1;
  Bytes now_bytes_ = 0, tier_used_bytes_ = 0, short_bytes_ = 0;
  double clock_ = 0, out_end_ = 0, in_end_ = 0;
  double queued_ = 0;  // when the host has queued all so far
};

}  // namespace lmswap::planner
