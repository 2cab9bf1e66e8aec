#include "schedule.h"

#include <algorithm>

namespace lmswap::planner {

Scheduler::Scheduler(const Step& step) : step_(step) {
  std::vector<int> uses_so_far(step.nbytes.size(), 0);
  for (int op = 0; op < step.num_ops(); ++op) {
    first_own_use_.push_back(own_uses_.size());
    const auto add = [&](int buffer, bool is_write) {
      // An op that reads what it writes uses it once.
      const auto begin = own_uses_.begin() + static_cast<std::ptrdiff_t>(first_own_use_[op]);
      const auto known = std::find_if(begin, own_uses_.end(), [&](const OwnUse& use) { return use.buffer == buffer; });
      if (known != own_uses_.end()) {
        known->is_write = known->is_write || is_write;
        return;
      }
      const int number = uses_so_far[buffer]++;
      own_uses_.push_back({buffer, step.first_gap[buffer] + number, is_write, number == 0});
    };
    for (const int buffer : step.reads[op]) add(buffer, false);
    for (const int buffer : step.writes[op]) add(buffer, true);
  }
  first_own_use_.push_back(own_uses_.size());
}

bool Scheduler::build(const std::vector<Fate>& fates, double most_rerun_seconds, Schedule& schedule) {
  fates_ = &fates;
  out_ = &schedule;
  const auto num_buffers = step_.nbytes.size();
  schedule.runs.clear();
  schedule.stretches.clear();
  schedule.segment_start.clear();
  schedule.segment_stop.clear();
  copies_.assign(num_buffers, Copy{-1, -1, -1, -1, false});
  newest_.assign(num_buffers, -1);
  is_there_.assign(num_buffers, 0);
  pins_.assign(num_buffers, 0);
  gap_.assign(step_.first_gap.begin(), step_.first_gap.end() - 1);
  most_runs_ = static_cast<std::size_t>(kMostRuns) * step_.seconds.size() + 64;
  rerun_seconds_left_ = most_rerun_seconds;
  depth_ = 0;
  for (const auto& segment : step_.segments) {
    schedule.segment_start.push_back(static_cast<int>(schedule.runs.size()));
    for (int op = segment.start; op < segment.stop; ++op) {
      if (!run(op)) return false;
    }
    schedule.segment_stop.push_back(static_cast<int>(schedule.runs.size()));
  }
  finish();
  return true;
}

// A run of the step's own, in its place.
bool Scheduler::run(int op) {
  if (!make_ready(op, op)) return false;
  const int at = static_cast<int>(out_->runs.size());
  out_->runs.push_back({op, op, -1});
  const auto* const fates = fates_->data();
  for (std::size_t number = first_own_use_[op]; number < first_own_use_[op + 1]; ++number) {
    const auto [buffer, gap, is_write, is_first] = own_uses_[number];
    if (is_first) {
      make(buffer, at);
      if (!is_write) copies_[buffer].last_write = -1;
    } else {
      use(buffer, at, is_write);
    }
    const Fate fate = fates[gap];
    gap_[buffer] = gap;
    copies_[newest_[buffer]].leaves = swaps(fate);
    is_there_[buffer] = !redoes(fate);
  }
  return true;
}

bool Scheduler::run_again(int op, int position, int gap) {
  rerun_seconds_left_ -= step_.seconds[op];
  if (rerun_seconds_left_ < 0 || out_->runs.size() >= most_runs_ || ++depth_ > kDeepest) return false;
  if (!make_ready(op, position)) return false;
  const int at = static_cast<int>(out_->runs.size());
  out_->runs.push_back({op, position, gap});
  for (const int buffer : step_.reads[op]) use(buffer, at, false);
  for (const int buffer : step_.writes[op]) make(buffer, at);
  for (const int buffer : step_.reads[op]) after_use_by_rerun(buffer);
  for (const int buffer : step_.writes[op]) after_use_by_rerun(buffer);
  --depth_;
  return true;
}

// Makes again what an op reads and is gone.
bool Scheduler::make_ready(int op, int position) {
  bool is_ready = true;
  for (const int buffer : step_.reads[op]) is_ready = is_ready && is_there(buffer);
  if (is_ready) return true;
  for (const int buffer : step_.reads[op]) ++pins_[buffer];
  for (const int buffer : step_.reads[op]) {
    if (!ensure(buffer, position)) return false;
  }
  for (const int buffer : step_.reads[op]) --pins_[buffer];
  return true;
}

bool Scheduler::ensure(int buffer, int position) {
  if (is_there(buffer)) return true;
  return run_again(step_.producer[buffer], position, gap_[buffer]);
}

void Scheduler::use(int buffer, int at, bool is_write) {
  const int copy = newest_[buffer];
  auto& known = copies_[copy];
  if (at > known.last_use + 1) {
    out_->stretches.push_back({copy, gap_[buffer], known.last_use, at, known.last_write, known.leaves});
  }
  known.last_use = at;
  if (is_write) known.last_write = at;
}

void Scheduler::make(int buffer, int at) {
  int copy = buffer;
  if (copies_[buffer].birth >= 0) {
    copy = static_cast<int>(copies_.size());
    copies_.push_back({});
  }
  copies_[copy] = {buffer, at, at, at, false};
  newest_[buffer] = copy;
  is_there_[buffer] = 1;
}

void Scheduler::after_use_by_rerun(int buffer) {
  const Fate fate = (*fates_)[gap_[buffer]];
  copies_[newest_[buffer]].leaves = fate == Fate::kSwapAgain;
  if (fate == Fate::kRedoAgain && pins_[buffer] == 0) is_there_[buffer] = 0;
}

void Scheduler::finish() {
  auto& schedule = *out_;
  const auto num_runs = schedule.runs.size();
  schedule.born.assign(num_runs + 1, 0);
  schedule.dead.assign(num_runs + 1, 0);
  schedule.copies.clear();
  for (std::size_t copy = 0; copy < copies_.size(); ++copy) {
    auto [buffer, birth, last_use, last_write, leaves] = copies_[copy];
    schedule.copies.push_back(copy < step_.nbytes.size() ? static_cast<int>(copy) : buffer);
    if (birth < 0) continue;  // no op uses it
    auto stop = static_cast<std::size_t>(last_use) + 1;
    auto start = static_cast<std::size_t>(birth);
    if (copy < step_.nbytes.size()) {
      if (step_.life[buffer] == Life::kToEnd) stop = num_runs;
      if (step_.life[buffer] == Life::kTangent) {
        const auto uses = step_.uses[buffer];
        start = schedule.segment_start[step_.segment_of[uses[0]]];
        stop = schedule.segment_stop[step_.segment_of[uses[uses.size() - 1]]];
      }
    }
    schedule.born[start] += step_.nbytes[buffer];
    schedule.dead[stop] += step_.nbytes[buffer];
  }
}

}  // namespace lmswap::planner
