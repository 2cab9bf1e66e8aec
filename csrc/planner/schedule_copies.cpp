#include "schedule_copies.h"

#include <algorithm>
#include <functional>

namespace lmswap::planner {
namespace {

constexpr Bytes kPageBytes = 4096;

Bytes pages(Bytes nbytes) { return (nbytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

// `below(a, b)`: b is nearer to the top of the heap.
template <typename Below>
void push(std::vector<int>& heap, int number, Below below) {
  heap.push_back(number);
  std::push_heap(heap.begin(), heap.end(), below);
}

template <typename Below>
int pop(std::vector<int>& heap, Below below) {
  std::pop_heap(heap.begin(), heap.end(), below);
  const int number = heap.back();
  heap.pop_back();
  return number;
}

}  // namespace

Placer::Placer(const Step& step, const Link& link, Bytes budget_bytes, Bytes tier_bytes)
    : step_(step), link_(link), budget_bytes_(budget_bytes), tier_bytes_(tier_bytes) {}

Outcome Placer::place(const Schedule& schedule, double most_seconds, std::vector<Swap>* swaps) {
  collect(schedule);
  const auto worst = std::max_element(resident_.begin(), resident_.end());
  if (worst != resident_.end() && *worst > budget_bytes_) {
    return {*worst - budget_bytes_, static_cast<int>(worst - resident_.begin()), 0, 0};
  }
  double to_come = 0;
  for (const auto& run : schedule.runs) to_come += step_.seconds[run.op];
  double least_seconds = to_come;
  if (least_seconds > most_seconds) return too_slow(least_seconds);
  promised_.assign(resident_);
  const int num_runs = static_cast<int>(schedule.runs.size());
  for (int at = 0; at < num_runs; ++at) {
    if (!step(at)) return {short_bytes_, at, 0, least_seconds};
    to_come -= step_.seconds[schedule.runs[at].op];
    least_seconds = std::max(least_seconds, clock_ + to_come);
    if (least_seconds > most_seconds) return too_slow(least_seconds);
  }
  if (swaps != nullptr) {
    swaps->clear();
    for (const auto& trip : trips_) {
      if (!trip.stays) swaps->push_back({trip.copy, trip.out_start, trip.release, trip.in_start, trip.before});
    }
  }
  return {0, -1, clock_, least_seconds};
}

// Lists the trips, and the memory curve without their buffers.
void Placer::collect(const Schedule& schedule) {
  schedule_ = &schedule;
  const auto num_runs = schedule.runs.size();
  segment_of_.resize(num_runs);
  for (std::size_t segment = 0; segment < schedule.segment_start.size(); ++segment) {
    std::fill(segment_of_.begin() + schedule.segment_start[segment],
              segment_of_.begin() + schedule.segment_stop[segment], static_cast<int>(segment));
  }
  trips_.clear();
  last_trip_.assign(schedule.num_copies, -1);
  resident_.assign(num_runs + 1, 0);
  for (const auto& stretch : schedule.stretches) {
    if (!stretch.leaves) continue;
    const int origin = segment_of_[stretch.after], destination = segment_of_[stretch.before];
    if (!step_.hands_on(origin, destination)) continue;
    const Bytes nbytes = step_.nbytes[stretch.buffer];
    const int before_it = last_trip_[stretch.copy];
    // A host copy of an earlier trip may be valid: that is known only when this one becomes idle.
    const int earliest = before_it >= 0 && trips_[before_it].last_write == stretch.last_write
                             ? stretch.after + 1
                             : std::max(stretch.last_write + 1, schedule.segment_start[origin]);
    if (before_it >= 0) trips_[before_it].is_last = false;
    last_trip_[stretch.copy] = static_cast<int>(trips_.size());
    // A backward directly after its forward can receive the buffer with the copy, and release it.
    const bool hands_over =
        destination != origin && schedule.segment_start[destination] == schedule.segment_stop[origin];
    trips_.push_back({stretch.copy, stretch.last_write, stretch.after, stretch.before, nbytes, earliest,
                      hands_over ? stretch.before : schedule.segment_stop[origin], schedule.segment_start[destination],
                      true});
    resident_[stretch.after + 1] -= nbytes;
    resident_[stretch.before] += nbytes;
  }
  Bytes held = 0;
  for (std::size_t at = 0; at < num_runs; ++at) {
    held += resident_[at] + schedule.born[at] - schedule.dead[at];
    resident_[at] = held + step_.scratch_bytes[schedule.runs[at].op];
  }
  resident_.pop_back();
  by_earliest_.resize(trips_.size());
  for (std::size_t number = 0; number < trips_.size(); ++number) by_earliest_[number] = static_cast<int>(number);
  std::sort(by_earliest_.begin(), by_earliest_.end(),
            [&](int a, int b) { return trips_[a].earliest < trips_[b].earliest; });
  last_trip_.assign(schedule.num_copies, -1);
  eligible_.clear();
  leaving_.clear();
  copied_.clear();
  left_.clear();
  away_.clear();
  next_earliest_ = next_leaving_ = next_need_ = next_segment_ = 0;
  num_outgoing_ = 0;
  blocked_trip_ = blocked_until_ = -1;
  now_bytes_ = tier_used_bytes_ = short_bytes_ = 0;
  clock_ = out_end_ = in_end_ = queued_ = 0;
}

// Inline: part of every run, and longer than what the compiler inlines by itself. With it and the scheduler's inline
// functions a search takes 15 % less.

// One run, and all actions just before it. False if memory is not enough.
inline bool Placer::step(int at) {
  now_bytes_ -= schedule_->dead[at];
  queue_outs(at);
  settle(at);
  if (!make_room(at)) return false;
  queue_ins(at);
  for (; next_need_ < trips_.size() && trips_[next_need_].before == at; ++next_need_) {
    const auto& trip = trips_[next_need_];
    wait(trip.in_end);
    if (trip.is_last && trip.out_start != -2) tier_used_bytes_ -= pages(trip.nbytes);
  }
  now_bytes_ += schedule_->born[at];
  clock_ = run_end(at);
  queued_ += link_.host_op_seconds;
  return true;
}

inline void Placer::queue_outs(int at) {
  for (; next_earliest_ < by_earliest_.size() && trips_[by_earliest_[next_earliest_]].earliest <= at;
       ++next_earliest_) {
    push(eligible_, by_earliest_[next_earliest_], idle_later());
  }
  while (!eligible_.empty() && (trips_[eligible_.front()].after < at || out_end_ <= clock_)) {
    queue_out(pop(eligible_, idle_later()), at);
  }
}

void Placer::queue_out(int number, int at) {
  auto& trip = trips_[number];
  if (has_good_copy(trip)) {
    trip.out_start = -1;
  } else if (tier_used_bytes_ + pages(trip.nbytes) > tier_bytes_) {
    trip.stays = true;
    promised_.add(at, trip.before, trip.nbytes);
    return;
  } else {
    trip.out_start = at;
    trip.out_end = copy(false, trip.nbytes);
    tier_used_bytes_ += pages(trip.nbytes);
  }
  last_trip_[trip.copy] = number;
  add_outgoing(number);
}

void Placer::add_outgoing(int number) {
  auto& trip = trips_[number];
  trip.out_number = num_outgoing_++;
  if (trip.out_end > clock_) {
    leaving_.push_back(number);
  } else {
    push(copied_, number, idle_later());
  }
}

// A host copy is valid for later trips while nothing is written, in the segment that the buffer was prefetched for.
bool Placer::has_good_copy(const Trip& trip) const {
  const int number = last_trip_[trip.copy];
  if (number < 0) return false;
  const auto& earlier = trips_[number];
  return !earlier.stays && earlier.last_write == trip.last_write &&
         segment_of_[earlier.before] == segment_of_[trip.after];
}

// Keeps buffers that are needed now and were not released.
inline void Placer::settle(int at) {
  for (auto need = next_need_; need < trips_.size() && trips_[need].before == at; ++need) {
    if (is_outgoing(trips_[need])) stay(static_cast<int>(need), at);
  }
  const auto& stops = schedule_->segment_stop;
  if (next_segment_ >= stops.size() || stops[next_segment_] != at) return;
  while (next_segment_ < stops.size() && stops[next_segment_] == at) ++next_segment_;
  settle_segment(at);
}

// At the end of a segment, trips that are not released and cannot be later are kept, if memory is free until their
// need, or waited for.
void Placer::settle_segment(int at) {
  std::vector<int> outgoing(leaving_.begin() + static_cast<std::ptrdiff_t>(next_leaving_), leaving_.end());
  outgoing.insert(outgoing.end(), copied_.begin(), copied_.end());
  outgoing.insert(outgoing.end(), left_.begin(), left_.end());
  leaving_.clear();
  copied_.clear();
  left_.clear();
  next_leaving_ = 0;
  std::erase_if(outgoing, [&](int number) { return !is_outgoing(trips_[number]); });
  const auto ending = std::partition(outgoing.begin(), outgoing.end(), [&](int n) { return trips_[n].limit != at; });
  std::sort(outgoing.begin(), ending, [&](int a, int b) { return trips_[a].out_number < trips_[b].out_number; });
  std::for_each(outgoing.begin(), ending, [&](int number) { add_outgoing(number); });
  std::sort(ending, outgoing.end());  // those needed first are kept first
  for (auto found = ending; found != outgoing.end(); ++found) {
    const int number = *found;
    const auto& trip = trips_[number];
    if (promised_.last_over(at, trip.before, budget_bytes_ - trip.nbytes) < 0) {
      stay(number, at);
    } else {
      release(number, at);
    }
  }
}

void Placer::stay(int number, int at) {
  auto& trip = trips_[number];
  trip.stays = true;
  promised_.add(at, trip.before, trip.nbytes);
}

void Placer::release(int number, int at) {
  auto& trip = trips_[number];
  wait(trip.out_end);
  trip.release = at;
  now_bytes_ -= trip.nbytes;
  push(away_, number, std::greater<>());
}

Bytes Placer::run_bytes(int at) const { return schedule_->born[at] + step_.scratch_bytes[schedule_->runs[at].op]; }

inline bool Placer::make_room(int at) {
  Bytes returning = 0;
  for (auto need = next_need_; need < trips_.size() && trips_[need].before == at; ++need) {
    if (trips_[need].release >= 0 && trips_[need].in_start < 0) returning += trips_[need].nbytes;
  }
  for (;;) {
    short_bytes_ = now_bytes_ + returning + run_bytes(at) - budget_bytes_;
    if (short_bytes_ <= 0) return true;
    int best = last_needed_of_left(at);
    if (best < 0) best = first_to_leave(at);
    if (best < 0) return false;
    release(best, at);
  }
}

// Releases finished trips needed later than `before`, until `wanted` fits in addition to this run.
bool Placer::make_room_without_stall(int at, Bytes wanted, int before) {
  while (now_bytes_ + wanted + run_bytes(at) > budget_bytes_) {
    const int best = last_needed_of_left(at);
    if (best < 0 || trips_[best].before <= before) return false;
    release(best, at);
  }
  return true;
}

// Of the idle trips that are copied out and not released, the one needed last; -1 if there is none.
int Placer::last_needed_of_left(int at) {
  const auto needed_earlier = [&](int a, int b) {
    return trips_[a].before != trips_[b].before ? trips_[a].before < trips_[b].before
                                                : trips_[a].out_number > trips_[b].out_number;
  };
  for (; next_leaving_ < leaving_.size() && trips_[leaving_[next_leaving_]].out_end <= clock_; ++next_leaving_) {
    push(copied_, leaving_[next_leaving_], idle_later());
  }
  while (!copied_.empty() && trips_[copied_.front()].after < at) {
    push(left_, pop(copied_, idle_later()), needed_earlier);
  }
  while (!left_.empty() && !is_outgoing(trips_[left_.front()])) pop(left_, needed_earlier);
  return left_.empty() ? -1 : left_.front();
}

// Of the idle trips whose copies out are unfinished, the one that ends first; -1 if there is none.
int Placer::first_to_leave(int at) const {
  const auto found = std::find_if(leaving_.begin() + static_cast<std::ptrdiff_t>(next_leaving_), leaving_.end(),
                                  [&](int number) { return is_outgoing(trips_[number]) && trips_[number].after < at; });
  return found == leaving_.end() ? -1 : *found;
}

inline void Placer::queue_ins(int at) {
  while (!away_.empty()) {
    const int number = away_.front();
    auto& trip = trips_[number];
    if (trip.before != at) {
      if (at < trip.return_earliest || in_end_ > run_end(at)) return;
      if (number == blocked_trip_ && at <= blocked_until_) return;
      blocked_trip_ = number;
      blocked_until_ = promised_.last_over(at, trip.before, budget_bytes_ - trip.nbytes);
      if (blocked_until_ >= 0 || !make_room_without_stall(at, trip.nbytes, trip.before)) return;
    }
    pop(away_, std::greater<>());
    queue_in(trip, at);
  }
}

void Placer::queue_in(Trip& trip, int at) {
  if (trip.release == at) {  // prefetched before its memory was free for a single run
    trip.stays = true;
  } else {
    trip.in_start = at;
    trip.in_end = copy(true, trip.nbytes);
  }
  now_bytes_ += trip.nbytes;
  promised_.add(at, trip.before, trip.nbytes);
}

double Placer::run_end(int at) const {
  const double start = std::max(clock_, queued_ + link_.host_op_seconds);
  return compute_end(link_, step_.seconds[schedule_->runs[at].op], start, out_end_, in_end_);
}

double Placer::copy(bool is_in, Bytes nbytes) {
  queued_ += link_.host_copy_seconds;
  wait(queued_);
  return queue_copy(link_, is_in, nbytes, clock_, out_end_, in_end_);
}

}  // namespace lmswap::planner
