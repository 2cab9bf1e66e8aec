#include "schedule_copies.h"

#include <algorithm>
#include <functional>

namespace lmswap::planner {
namespace {

constexpr Bytes kPageBytes = 4096;
constexpr int kNoPlace = -2;  // for a persistent version, in the tier

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

CopyScheduler::CopyScheduler(const Step& step, const Link& link, Bytes budget_bytes, Bytes tier_bytes,
                             int prefetches_ahead)
    : step_(step),
      link_(link),
      budget_bytes_(budget_bytes),
      tier_bytes_(tier_bytes),
      prefetches_ahead_(prefetches_ahead) {}

Outcome CopyScheduler::schedule(const Schedule& schedule, double max_seconds, std::vector<Swap>* result) {
  collect(schedule);
  const auto worst = std::max_element(min_bytes_.begin(), min_bytes_.end());
  if (worst != min_bytes_.end() && *worst > budget_bytes_) {
    return {*worst - budget_bytes_, static_cast<int>(worst - min_bytes_.begin()), 0, 0};
  }
  double remaining_seconds = 0;
  for (const auto& run : schedule.runs) remaining_seconds += step_.seconds[run.op];
  double min_seconds = remaining_seconds;
  if (min_seconds > max_seconds) return too_slow(min_seconds);
  reserved_.assign(min_bytes_);
  const int num_runs = static_cast<int>(schedule.runs.size());
  for (int at = 0; at < num_runs; ++at) {
    if (!run_op(at)) return {excess_bytes_, at, 0, min_seconds};
    remaining_seconds -= step_.seconds[schedule.runs[at].op];
    min_seconds = std::max(min_seconds, clock_ + remaining_seconds);
    if (min_seconds > max_seconds) return too_slow(min_seconds);
  }
  end_step(num_runs);
  min_seconds = std::max(min_seconds, clock_);
  if (min_seconds > max_seconds) return too_slow(min_seconds);
  if (result != nullptr) list(num_runs, *result);
  return {0, -1, clock_, min_seconds};
}

// Releases what is non-resident at the step's end: no copy is under way there.
void CopyScheduler::end_step(int num_runs) {
  queue_swap_outs(num_runs);
  for (std::size_t number = 0; number < swaps_.size(); ++number) {
    if (swaps_[number].ends_offloaded && is_pending(swaps_[number])) release(static_cast<int>(number), num_runs);
  }
}

// Positions in the next step follow those in this one.
void CopyScheduler::list(int num_runs, std::vector<Swap>& result) const {
  result.clear();
  std::vector<int> at_end(last_swap_.size(), -1);  // by version: the swap that ends offloaded
  for (std::size_t number = 0; number < swaps_.size(); ++number) {
    if (swaps_[number].ends_offloaded) at_end[swaps_[number].version] = static_cast<int>(number);
  }
  for (const auto& swap : swaps_) {
    if (swap.is_cancelled || swap.ends_offloaded) continue;
    Swap found{swap.version, swap.out_start, swap.release, swap.in_start, swap.next_use};
    if (swap.last_use < 0) {
      found.in_start += num_runs;
      found.first_use += num_runs;
      if (swap.starts_offloaded) {
        found.out_start = swaps_[at_end[swap.version]].out_start;
        found.release = swaps_[at_end[swap.version]].release;
      } else {
        found.release += num_runs;
        if (found.out_start >= 0) found.out_start += num_runs;
      }
    }
    result.push_back(found);
  }
}

// Lists the swaps, and the memory curve with all of their buffers non-resident.
void CopyScheduler::collect(const Schedule& schedule) {
  schedule_ = &schedule;
  const auto num_runs = schedule.runs.size();
  segment_of_.resize(num_runs);
  for (std::size_t segment = 0; segment < schedule.segment_start.size(); ++segment) {
    std::fill(segment_of_.begin() + schedule.segment_start[segment],
              segment_of_.begin() + schedule.segment_stop[segment], static_cast<int>(segment));
  }
  swaps_.clear();
  tier_used_bytes_ = 0;
  last_swap_.assign(schedule.num_versions, -1);
  min_bytes_.assign(num_runs + 1, 0);
  for (const auto& interval : schedule.idle_intervals) {
    if (!interval.is_swapped) continue;
    if (step_.is_shared(interval.buffer)) {
      add_shared(interval, static_cast<int>(num_runs));
      continue;
    }
    const int origin = segment_of_[interval.last_use], destination = segment_of_[interval.next_use];
    if (!step_.can_pass(origin, destination)) continue;
    const Bytes nbytes = step_.nbytes[interval.buffer];
    const int previous = last_swap_[interval.version];
    // A host copy of an earlier swap may be valid: that is known only when this one becomes idle.
    const int earliest_out = previous >= 0 && swaps_[previous].last_write == interval.last_write
                                 ? interval.last_use + 1
                                 : std::max(interval.last_write + 1, schedule.segment_start[origin]);
    if (previous >= 0) swaps_[previous].is_last_of_version = false;
    last_swap_[interval.version] = static_cast<int>(swaps_.size());
    // A backward directly after its forward can receive the buffer with the copy, and release it.
    const bool is_passed_directly =
        destination != origin && schedule.segment_start[destination] == schedule.segment_stop[origin];
    swaps_.push_back({interval.version, interval.last_write, interval.last_use, interval.next_use, nbytes, earliest_out,
                      is_passed_directly ? interval.next_use : schedule.segment_stop[origin],
                      schedule.segment_start[destination], true, false, false, false, false});
    min_bytes_[interval.last_use + 1] -= nbytes;
    min_bytes_[interval.next_use] += nbytes;
  }
  Bytes held = 0;
  for (std::size_t at = 0; at < num_runs; ++at) {
    held += min_bytes_[at] + schedule.allocated_bytes[at] - schedule.freed_bytes[at];
    min_bytes_[at] = held + step_.scratch_bytes[schedule.runs[at].op];
  }
  min_bytes_.pop_back();
  by_earliest_out_.resize(swaps_.size());
  for (std::size_t number = 0; number < swaps_.size(); ++number) by_earliest_out_[number] = static_cast<int>(number);
  std::sort(by_earliest_out_.begin(), by_earliest_out_.end(),
            [&](int a, int b) { return swaps_[a].earliest_out < swaps_[b].earliest_out; });
  last_swap_.assign(schedule.num_versions, -1);
  eligible_.clear();
  idle_at_start_.clear();
  outgoing_.clear();
  copied_out_.clear();
  evictable_.clear();
  offloaded_.clear();
  next_eligible_ = next_outgoing_ = next_need_ = next_segment_ = 0;
  num_queued_out_ = 0;
  blocked_swap_ = blocked_until_ = -1;
  resident_bytes_ = excess_bytes_ = 0;
  clock_ = out_end_ = in_end_ = queued_ = 0;
  for (std::size_t number = 0; number < swaps_.size(); ++number) {
    auto& swap = swaps_[number];
    if (!swap.starts_offloaded) continue;
    swap.out_start = -1;
    swap.release = 0;
    resident_bytes_ -= swap.nbytes;
    last_swap_[swap.version] = static_cast<int>(number);
    push(offloaded_, static_cast<int>(number), std::greater<>());
  }
}

// A swap of a buffer that every segment can use. Persistent ones for which the tier has no place stay resident.
void CopyScheduler::add_shared(const IdleInterval& interval, int num_runs) {
  const Bytes nbytes = step_.nbytes[interval.buffer];
  const bool is_persistent = step_.is_persistent(interval.buffer);
  const int previous = last_swap_[interval.version];
  const bool has_no_place =
      previous == kNoPlace || (is_persistent && previous < 0 && tier_used_bytes_ + pages(nbytes) > tier_bytes_);
  if (has_no_place) {
    last_swap_[interval.version] = kNoPlace;
    return;
  }
  const bool may_have_copy = interval.starts_offloaded || (is_persistent && step_.last_write[interval.buffer] < 0) ||
                             (previous >= 0 && swaps_[previous].last_write == interval.last_write);
  if (previous >= 0) swaps_[previous].is_last_of_version = false;
  if (previous < 0 && is_persistent) tier_used_bytes_ += pages(nbytes);
  last_swap_[interval.version] = static_cast<int>(swaps_.size());
  const int earliest_out = may_have_copy ? interval.last_use + 1 : interval.last_write + 1;
  const bool is_own_prefetch = step_.is_fetched(interval.buffer) && interval.next_use < num_runs;
  const int earliest_in = is_own_prefetch ? schedule_->segment_start[segment_of_[interval.next_use]] : 0;
  swaps_.push_back({interval.version, interval.last_write, interval.last_use, interval.next_use, nbytes, earliest_out,
                    interval.next_use, earliest_in, true, true, is_persistent, interval.starts_offloaded,
                    interval.ends_offloaded});
  min_bytes_[interval.last_use + 1] -= nbytes;
  min_bytes_[interval.next_use] += nbytes;
}

// Inline: part of every run, and longer than what the compiler inlines by itself. With it and the scheduler's inline
// functions a search takes 15 % less.

// One run, and all copies and releases just before it. Returns false if memory is not enough.
inline bool CopyScheduler::run_op(int at) {
  resident_bytes_ -= schedule_->freed_bytes[at];
  queue_swap_outs(at);
  cancel_unreleased(at);
  if (!evict_for_run(at)) return false;
  queue_prefetches(at);
  for (; next_need_ < swaps_.size() && swaps_[next_need_].next_use == at; ++next_need_) {
    const auto& swap = swaps_[next_need_];
    wait(swap.in_end);
    if (swap.is_last_of_version && swap.out_start != -2 && !swap.is_persistent) tier_used_bytes_ -= pages(swap.nbytes);
  }
  resident_bytes_ += schedule_->allocated_bytes[at];
  clock_ = run_end(at);
  queued_ += link_.host_op_seconds;
  return true;
}

inline void CopyScheduler::queue_swap_outs(int at) {
  for (; next_eligible_ < by_earliest_out_.size() && swaps_[by_earliest_out_[next_eligible_]].earliest_out <= at;
       ++next_eligible_) {
    const int number = by_earliest_out_[next_eligible_];
    if (swaps_[number].starts_offloaded) continue;
    if (swaps_[number].last_use < 0) {
      push(idle_at_start_, number, std::less<>());
    } else {
      push(eligible_, number, idle_later());
    }
  }
  while (!eligible_.empty() && (swaps_[eligible_.front()].last_use < at || out_end_ <= clock_)) {
    queue_swap_out(pop(eligible_, idle_later()), at);
  }
  while (out_end_ <= clock_ && queue_swap_out_of_start(at)) {
  }
}

// Queues, of the buffers that are idle since the step's start, the one needed last; returns false if there is none.
bool CopyScheduler::queue_swap_out_of_start(int at) {
  while (!idle_at_start_.empty()) {
    const int number = pop(idle_at_start_, std::less<>());
    if (swaps_[number].is_cancelled || swaps_[number].next_use <= at) continue;
    queue_swap_out(number, at);
    return true;
  }
  return false;
}

void CopyScheduler::queue_swap_out(int number, int at) {
  auto& swap = swaps_[number];
  if (has_valid_copy(swap)) {
    swap.out_start = -1;
  } else if (!swap.is_persistent && tier_used_bytes_ + pages(swap.nbytes) > tier_bytes_) {
    swap.is_cancelled = true;
    reserved_.add(at, swap.next_use, swap.nbytes);
    return;
  } else {
    swap.out_start = at;
    swap.out_end = copy(false, swap.nbytes);
    if (!swap.is_persistent) tier_used_bytes_ += pages(swap.nbytes);
  }
  last_swap_[swap.version] = number;
  add_pending(number);
}

void CopyScheduler::add_pending(int number) {
  auto& swap = swaps_[number];
  swap.out_order = num_queued_out_++;
  if (swap.out_end > clock_) {
    outgoing_.push_back(number);
  } else {
    push(copied_out_, number, idle_later());
  }
}

// A host copy is valid for later swaps while nothing is written, in the segment that the buffer was prefetched for;
// that of a persistent buffer that nothing writes, for good.
bool CopyScheduler::has_valid_copy(const PendingSwap& swap) const {
  if (swap.is_persistent && step_.last_write[swap.version] < 0) return true;
  const int number = last_swap_[swap.version];
  if (number < 0) return false;
  const auto& earlier = swaps_[number];
  if (earlier.is_cancelled || earlier.last_write != swap.last_write) return false;
  return swap.is_shared || segment_of_[earlier.next_use] == segment_of_[swap.last_use];
}

// Cancels swaps whose buffers are needed now and were not released.
inline void CopyScheduler::cancel_unreleased(int at) {
  for (auto need = next_need_; need < swaps_.size() && swaps_[need].next_use == at; ++need) {
    if (is_pending(swaps_[need])) cancel(static_cast<int>(need), at);
  }
  const auto& stops = schedule_->segment_stop;
  if (next_segment_ >= stops.size() || stops[next_segment_] != at) return;
  while (next_segment_ < stops.size() && stops[next_segment_] == at) ++next_segment_;
  end_segment(at);
}

// At the end of a segment, swaps that are not released and cannot be later are cancelled, if memory is free until
// their next use, or waited for.
void CopyScheduler::end_segment(int at) {
  std::vector<int> pending(outgoing_.begin() + static_cast<std::ptrdiff_t>(next_outgoing_), outgoing_.end());
  pending.insert(pending.end(), copied_out_.begin(), copied_out_.end());
  pending.insert(pending.end(), evictable_.begin(), evictable_.end());
  outgoing_.clear();
  copied_out_.clear();
  evictable_.clear();
  next_outgoing_ = 0;
  std::erase_if(pending, [&](int number) { return !is_pending(swaps_[number]); });
  const auto ending =
      std::partition(pending.begin(), pending.end(), [&](int n) { return swaps_[n].release_deadline != at; });
  std::sort(pending.begin(), ending, [&](int a, int b) { return swaps_[a].out_order < swaps_[b].out_order; });
  std::for_each(pending.begin(), ending, [&](int number) { add_pending(number); });
  std::sort(ending, pending.end());  // those needed first are cancelled first
  for (auto found = ending; found != pending.end(); ++found) {
    const int number = *found;
    const auto& swap = swaps_[number];
    if (reserved_.last_over(at, swap.next_use, budget_bytes_ - swap.nbytes) < 0) {
      cancel(number, at);
    } else {
      release(number, at);
    }
  }
}

void CopyScheduler::cancel(int number, int at) {
  auto& swap = swaps_[number];
  swap.is_cancelled = true;
  reserved_.add(at, swap.next_use, swap.nbytes);
}

void CopyScheduler::release(int number, int at) {
  auto& swap = swaps_[number];
  wait(swap.out_end);
  swap.release = at;
  resident_bytes_ -= swap.nbytes;
  if (!swap.ends_offloaded) push(offloaded_, number, std::greater<>());
}

Bytes CopyScheduler::run_bytes(int at) const {
  return schedule_->allocated_bytes[at] + step_.scratch_bytes[schedule_->runs[at].op];
}

inline bool CopyScheduler::evict_for_run(int at) {
  Bytes prefetch_bytes = 0;
  for (auto need = next_need_; need < swaps_.size() && swaps_[need].next_use == at; ++need) {
    if (swaps_[need].release >= 0 && swaps_[need].in_start < 0) prefetch_bytes += swaps_[need].nbytes;
  }
  for (;;) {
    excess_bytes_ = resident_bytes_ + prefetch_bytes + run_bytes(at) - budget_bytes_;
    if (excess_bytes_ <= 0) return true;
    int best = last_needed_evictable(at);
    if (best < 0) best = first_to_be_copied_out(at);
    if (best < 0 && queue_swap_out_of_start(at)) continue;
    if (best < 0) return false;
    release(best, at);
  }
}

// Releases finished swaps needed later than run `needed_at`, until `wanted` bytes fit in addition to this run.
bool CopyScheduler::evict_without_stall(int at, Bytes wanted, int needed_at) {
  while (resident_bytes_ + wanted + run_bytes(at) > budget_bytes_) {
    const int best = last_needed_evictable(at);
    if (best < 0 || swaps_[best].next_use <= needed_at) return false;
    release(best, at);
  }
  return true;
}

// Of the swaps of idle buffers that are copied out and not released, the one needed last; -1 if there is none.
int CopyScheduler::last_needed_evictable(int at) {
  const auto needed_earlier = [&](int a, int b) {
    return swaps_[a].next_use != swaps_[b].next_use ? swaps_[a].next_use < swaps_[b].next_use
                                                    : swaps_[a].out_order > swaps_[b].out_order;
  };
  for (; next_outgoing_ < outgoing_.size() && swaps_[outgoing_[next_outgoing_]].out_end <= clock_; ++next_outgoing_) {
    push(copied_out_, outgoing_[next_outgoing_], idle_later());
  }
  while (!copied_out_.empty() && swaps_[copied_out_.front()].last_use < at) {
    push(evictable_, pop(copied_out_, idle_later()), needed_earlier);
  }
  while (!evictable_.empty() && !is_pending(swaps_[evictable_.front()])) pop(evictable_, needed_earlier);
  return evictable_.empty() ? -1 : evictable_.front();
}

// Of the swaps of idle buffers whose copies out are unfinished, the one that ends first; -1 if there is none.
int CopyScheduler::first_to_be_copied_out(int at) const {
  const auto found =
      std::find_if(outgoing_.begin() + static_cast<std::ptrdiff_t>(next_outgoing_), outgoing_.end(),
                   [&](int number) { return is_pending(swaps_[number]) && swaps_[number].last_use < at; });
  return found == outgoing_.end() ? -1 : *found;
}

inline void CopyScheduler::queue_prefetches(int at) {
  while (!offloaded_.empty()) {
    const int number = offloaded_.front();
    auto& swap = swaps_[number];
    if (swap.next_use != at) {
      const double ahead_seconds = prefetches_ahead_ == 0 ? 0 : prefetches_ahead_ * link_.in.seconds(swap.nbytes);
      if (at < swap.earliest_in || in_end_ > run_end(at) + ahead_seconds) return;
      if (number == blocked_swap_ && at <= blocked_until_) return;
      blocked_swap_ = number;
      blocked_until_ = reserved_.last_over(at, swap.next_use, budget_bytes_ - swap.nbytes);
      if (blocked_until_ >= 0 || !evict_without_stall(at, swap.nbytes, swap.next_use)) return;
    }
    pop(offloaded_, std::greater<>());
    queue_prefetch(swap, at);
  }
}

void CopyScheduler::queue_prefetch(PendingSwap& swap, int at) {
  if (swap.release == at && !swap.starts_offloaded) {  // prefetched before its memory was free for a single run
    swap.is_cancelled = true;
  } else {
    swap.in_start = at;
    swap.in_end = copy(true, swap.nbytes);
  }
  resident_bytes_ += swap.nbytes;
  reserved_.add(at, swap.next_use, swap.nbytes);
}

double CopyScheduler::run_end(int at) const {
  const double start = std::max(clock_, queued_ + link_.host_op_seconds);
  return compute_end(link_, step_.seconds[schedule_->runs[at].op], start, out_end_, in_end_);
}

double CopyScheduler::copy(bool is_in, Bytes nbytes) {
  queued_ += link_.host_copy_seconds;
  wait(queued_);
  return queue_copy(link_, is_in, nbytes, clock_, out_end_, in_end_);
}

}  // namespace lmswap::planner
