#include "place.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace lmswap::planner {
namespace {

constexpr Bytes kPageBytes = 4096;
constexpr Outcome kTooSlow{0, -1, std::numeric_limits<double>::infinity()};

Bytes pages(Bytes nbytes) { return (nbytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

}  // namespace

Placer::Placer(const Step& step, const Link& link, Bytes budget_bytes, Bytes tier_bytes)
    : step_(step), link_(link), budget_bytes_(budget_bytes), tier_bytes_(tier_bytes) {}

Outcome Placer::place(const Schedule& schedule, double most_seconds, std::vector<Swap>* swaps) {
  collect(schedule);
  Outcome outcome;
  const auto worst = std::max_element(resident_.begin(), resident_.end());
  if (worst != resident_.end() && *worst > budget_bytes_) {
    return {*worst - budget_bytes_, static_cast<int>(worst - resident_.begin()), 0};
  }
  double to_come = 0;
  for (const auto& run : schedule.runs) to_come += step_.seconds[run.op];
  if (to_come > most_seconds) return kTooSlow;
  promised_.assign(resident_);
  const int num_runs = static_cast<int>(schedule.runs.size());
  for (int at = 0; at < num_runs; ++at) {
    if (!step(at)) return {short_bytes_, at, 0};
    to_come -= step_.seconds[schedule.runs[at].op];
    if (clock_ + to_come > most_seconds) return kTooSlow;
  }
  outcome.seconds = clock_;
  if (swaps != nullptr) {
    swaps->clear();
    for (const auto& trip : trips_) {
      if (!trip.stays) swaps->push_back({trip.copy, trip.out_start, trip.release, trip.in_start, trip.before});
    }
  }
  return outcome;
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
  last_trip_.assign(schedule.copies.size(), -1);
  resident_.assign(num_runs + 1, 0);
  for (const auto& stretch : schedule.stretches) {
    if (!stretch.leaves) continue;
    const int origin = segment_of_[stretch.after], destination = segment_of_[stretch.before];
    if (!step_.hands_on(origin, destination)) continue;
    const Bytes nbytes = step_.nbytes[schedule.copies[stretch.copy]];
    const int before_it = last_trip_[stretch.copy];
    // A copy out of an earlier trip may still be good: that is known only when this one falls idle.
    const int earliest = before_it >= 0 && trips_[before_it].last_write == stretch.last_write
                             ? stretch.after + 1
                             : std::max(stretch.last_write + 1, schedule.segment_start[origin]);
    if (before_it >= 0) trips_[before_it].is_last = false;
    last_trip_[stretch.copy] = static_cast<int>(trips_.size());
    trips_.push_back({stretch.copy, stretch.last_write, stretch.after, stretch.before, nbytes, earliest,
                      schedule.segment_stop[origin], schedule.segment_start[destination], true});
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
  last_trip_.assign(schedule.copies.size(), -1);
  eligible_.clear();
  outgoing_.clear();
  away_.clear();
  next_earliest_ = next_need_ = next_segment_ = 0;
  blocked_trip_ = blocked_until_ = -1;
  now_bytes_ = tier_used_bytes_ = short_bytes_ = 0;
  clock_ = out_end_ = in_end_ = 0;
}

// One run, and all that happens just before it. False if there is no room for it.
bool Placer::step(int at) {
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
  return true;
}

void Placer::queue_outs(int at) {
  const auto idle_later = [&](int a, int b) { return trips_[a].after > trips_[b].after; };
  for (; next_earliest_ < by_earliest_.size() && trips_[by_earliest_[next_earliest_]].earliest <= at;
       ++next_earliest_) {
    eligible_.push_back(by_earliest_[next_earliest_]);
    std::push_heap(eligible_.begin(), eligible_.end(), idle_later);
  }
  while (!eligible_.empty() && (trips_[eligible_.front()].after < at || out_end_ <= clock_)) {
    const int number = eligible_.front();
    std::pop_heap(eligible_.begin(), eligible_.end(), idle_later);
    eligible_.pop_back();
    queue_out(number, at);
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
  outgoing_.push_back(number);
}

// A copy out counts for later trips as long as nothing is written, in the function that the buffer came back to.
bool Placer::has_good_copy(const Trip& trip) const {
  const int number = last_trip_[trip.copy];
  if (number < 0) return false;
  const auto& earlier = trips_[number];
  return !earlier.stays && earlier.last_write == trip.last_write &&
         segment_of_[earlier.before] == segment_of_[trip.after];
}

// What is wanted now was not worth releasing. At the end of a segment what has not been released stays, if there is
// room until it is wanted, or is waited for.
void Placer::settle(int at) {
  for (auto need = next_need_; need < trips_.size() && trips_[need].before == at; ++need) {
    if (trips_[need].release >= 0 || trips_[need].stays) continue;
    const auto found = std::find(outgoing_.begin(), outgoing_.end(), static_cast<int>(need));
    stay(static_cast<std::size_t>(found - outgoing_.begin()), at);
  }
  const auto& stops = schedule_->segment_stop;
  if (next_segment_ >= stops.size() || stops[next_segment_] != at) return;
  while (next_segment_ < stops.size() && stops[next_segment_] == at) ++next_segment_;
  std::sort(outgoing_.begin(), outgoing_.end());  // what is wanted back first has the best claim to stay
  for (std::size_t index = 0; index < outgoing_.size();) {
    const auto& trip = trips_[outgoing_[index]];
    if (trip.limit != at) {
      ++index;
    } else if (promised_.last_over(at, trip.before, budget_bytes_ - trip.nbytes) < 0) {
      stay(index, at);
    } else {
      release(index, at);
    }
  }
}

void Placer::stay(std::size_t outgoing, int at) {
  auto& trip = trips_[outgoing_[outgoing]];
  trip.stays = true;
  promised_.add(at, trip.before, trip.nbytes);
  outgoing_.erase(outgoing_.begin() + static_cast<std::ptrdiff_t>(outgoing));
}

void Placer::release(std::size_t outgoing, int at) {
  const int number = outgoing_[outgoing];
  auto& trip = trips_[number];
  wait(trip.out_end);
  trip.release = at;
  now_bytes_ -= trip.nbytes;
  outgoing_.erase(outgoing_.begin() + static_cast<std::ptrdiff_t>(outgoing));
  away_.push_back(number);
  std::push_heap(away_.begin(), away_.end(), std::greater<>());
}

Bytes Placer::run_bytes(int at) const { return schedule_->born[at] + step_.scratch_bytes[schedule_->runs[at].op]; }

bool Placer::make_room(int at) {
  Bytes returning = 0;
  for (auto need = next_need_; need < trips_.size() && trips_[need].before == at; ++need) {
    if (trips_[need].release >= 0 && trips_[need].in_start < 0) returning += trips_[need].nbytes;
  }
  for (;;) {
    short_bytes_ = now_bytes_ + returning + run_bytes(at) - budget_bytes_;
    if (short_bytes_ <= 0) return true;
    std::size_t best = outgoing_.size();
    bool best_left = false;
    for (std::size_t index = 0; index < outgoing_.size(); ++index) {
      const auto& trip = trips_[outgoing_[index]];
      if (trip.after >= at) continue;
      const bool left = trip.out_end <= clock_;
      if (best == outgoing_.size() || (left && !best_left) ||
          (left == best_left &&
           (left ? trip.before > trips_[outgoing_[best]].before : trip.out_end < trips_[outgoing_[best]].out_end))) {
        best = index;
        best_left = left;
      }
    }
    if (best == outgoing_.size()) return false;
    release(best, at);
  }
}

// Releases what has left and is wanted back later than `before`, until there is room for `wanted` beside this run.
bool Placer::make_room_without_stall(int at, Bytes wanted, int before) {
  while (now_bytes_ + wanted + run_bytes(at) > budget_bytes_) {
    std::size_t best = outgoing_.size();
    for (std::size_t index = 0; index < outgoing_.size(); ++index) {
      const auto& trip = trips_[outgoing_[index]];
      if (trip.after >= at || trip.out_end > clock_ || trip.before <= before) continue;
      if (best == outgoing_.size() || trip.before > trips_[outgoing_[best]].before) best = index;
    }
    if (best == outgoing_.size()) return false;
    release(best, at);
  }
  return true;
}

void Placer::queue_ins(int at) {
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
    std::pop_heap(away_.begin(), away_.end(), std::greater<>());
    away_.pop_back();
    queue_in(trip, at);
  }
}

void Placer::queue_in(Trip& trip, int at) {
  if (trip.release == at) {  // it is back before its memory was free for a single run
    trip.stays = true;
  } else {
    trip.in_start = at;
    trip.in_end = copy(true, trip.nbytes);
  }
  now_bytes_ += trip.nbytes;
  promised_.add(at, trip.before, trip.nbytes);
}

double Placer::run_end(int at) const {
  return compute_end(link_, step_.seconds[schedule_->runs[at].op], clock_, out_end_, in_end_);
}

double Placer::copy(bool is_in, Bytes nbytes) { return queue_copy(link_, is_in, nbytes, clock_, out_end_, in_end_); }

}  // namespace lmswap::planner
