#include "schedule.h"

#include <algorithm>

namespace lmswap::planner {

Scheduler::Scheduler(const Step& step) : step_(step) {
  std::vector<std::vector<int>> used(step.seconds.size()), gap_after(step.seconds.size());
  std::vector<int> next(step.first_gap.begin(), step.first_gap.end() - 1);
  for (int op = 0; op < step.num_ops(); ++op) {
    for (const auto& row : {step.reads[op], step.writes[op]}) {
      for (const int buffer : row) {
        // An op that reads what it writes uses it once.
        if (std::find(used[op].begin(), used[op].end(), buffer) != used[op].end()) continue;
        used[op].push_back(buffer);
        gap_after[op].push_back(next[buffer]++);
      }
    }
  }
  used_ = Rows(used);
  gap_after_ = Rows(gap_after);
}

bool Scheduler::build(const std::vector<Fate>& fates, Schedule& schedule) {
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
  depth_ = 0;
  for (const auto& segment : step_.segments) {
    schedule.segment_start.push_back(static_cast<int>(schedule.runs.size()));
    for (int op = segment.start; op < segment.stop; ++op) {
      if (!run(op, op, -1)) return false;
    }
    schedule.segment_stop.push_back(static_cast<int>(schedule.runs.size()));
  }
  finish();
  return true;
}

bool Scheduler::run(int op, int position, int gap) {
  const bool is_rerun = op != position;
  if (out_->runs.size() >= most_runs_ || ++depth_ > kDeepest) return false;
  bool is_ready = true;
  for (const int buffer : step_.reads[op]) is_ready = is_ready && is_there(buffer);
  if (!is_ready) {
    for (const int buffer : step_.reads[op]) ++pins_[buffer];
    for (const int buffer : step_.reads[op]) {
      if (!ensure(buffer, position)) return false;
    }
    for (const int buffer : step_.reads[op]) --pins_[buffer];
  }
  const int at = static_cast<int>(out_->runs.size());
  out_->runs.push_back({op, position, gap});
  for (const int buffer : step_.reads[op]) use(buffer, at, false);
  for (const int buffer : step_.writes[op]) {
    if (is_rerun || step_.producer[buffer] == op) {
      make(buffer, at);
    } else {
      use(buffer, at, true);
    }
  }
  if (is_rerun) {
    for (const int buffer : step_.reads[op]) after_use_by_rerun(buffer);
    for (const int buffer : step_.writes[op]) after_use_by_rerun(buffer);
  } else {
    after_own_uses(op);
  }
  --depth_;
  return true;
}

bool Scheduler::ensure(int buffer, int position) {
  if (is_there(buffer)) return true;
  return run(step_.producer[buffer], position, gap_[buffer]);
}

void Scheduler::use(int buffer, int at, bool is_write) {
  int copy = newest_[buffer];
  if (copy < 0) {  // a tangent: handed in, not made
    copy = newest_[buffer] = buffer;
    copies_[buffer] = {buffer, at, at, -1, false};
    is_there_[buffer] = 1;
  }
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

void Scheduler::after_own_uses(int op) {
  const auto used = used_[op], gaps = gap_after_[op];
  for (std::size_t number = 0; number < used.size(); ++number) {
    const int buffer = used[number], gap = gaps[number];
    gap_[buffer] = gap;
    const Fate fate = (*fates_)[gap];
    copies_[newest_[buffer]].leaves = swaps(fate);
    if (redoes(fate)) is_there_[buffer] = 0;
  }
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
