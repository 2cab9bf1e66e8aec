#include "schedule.h"

#include <algorithm>

namespace lmswap::planner {
namespace {

// Extends `key` by `what` at run `at`. In one of 10¹⁰ searches two schedules collide.
std::uint64_t extend(std::uint64_t key, int what, int at) {
  key ^= static_cast<std::uint64_t>(what) << 32 | static_cast<std::uint32_t>(at);
  key *= 0x9e3779b97f4a7c15;
  return key ^ key >> 32;
}

}  // namespace

Scheduler::Scheduler(const Step& step) : step_(step) {
  for (const Life life : step.life) at_start_.push_back(life == Life::kTangent);
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
  schedule.key = 0;
  copies_.assign(num_buffers, Copy{-1, -1, -1, -1, false});
  newest_.assign(num_buffers, -1);
  is_there_ = at_start_;
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

// A run of the step itself, at its position.
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
  out_->key = extend(out_->key, op, at);
  for (const int buffer : step_.reads[op]) use(buffer, at, false);
  for (const int buffer : step_.writes[op]) make(buffer, at);
  for (const int buffer : step_.reads[op]) after_use_by_rerun(buffer);
  for (const int buffer : step_.writes[op]) after_use_by_rerun(buffer);
  --depth_;
  return true;
}

// Recomputes the inputs of an op that are not resident.
inline bool Scheduler::make_ready(int op, int position) {
  bool is_ready = true;
  for (const int buffer : step_.reads[op]) is_ready = is_ready && is_there_[buffer] != 0;
  if (is_ready) return true;
  for (const int buffer : step_.reads[op]) ++pins_[buffer];
  for (const int buffer : step_.reads[op]) {
    if (!ensure(buffer, position)) return false;
  }
  for (const int buffer : step_.reads[op]) --pins_[buffer];
  return true;
}

inline bool Scheduler::ensure(int buffer, int position) {
  if (is_there_[buffer] != 0) return true;
  return run_again(step_.producer[buffer], position, gap_[buffer]);
}

inline void Scheduler::use(int buffer, int at, bool is_write) {
  const int copy = newest_[buffer];
  auto& known = copies_[copy];
  if (at > known.last_use + 1) {
    out_->stretches.push_back({buffer, copy, gap_[buffer], known.last_use, at, known.last_write, known.leaves});
    if (known.leaves) out_->key = extend(out_->key, -1 - copy, at);
  }
  known.last_use = at;
  if (is_write) known.last_write = at;
}

inline void Scheduler::make(int buffer, int at) {
  int copy = buffer;
  if (copies_[buffer].birth >= 0) {
    copy = static_cast<int>(copies_.size());
    copies_.push_back({});
  }
  copies_[copy] = {buffer, at, at, at, false};
  newest_[buffer] = copy;
  is_there_[buffer] = 1;
}

inline void Scheduler::after_use_by_rerun(int buffer) {
  const Fate fate = (*fates_)[gap_[buffer]];
  copies_[newest_[buffer]].leaves = fate == Fate::kSwapAgain;
  if (fate == Fate::kRedoAgain && pins_[buffer] == 0) is_there_[buffer] = 0;
}

void Scheduler::finish() {
  auto& schedule = *out_;
  const auto num_runs = schedule.runs.size();
  schedule.born.assign(num_runs + 1, 0);
  schedule.dead.assign(num_runs + 1, 0);
  schedule.num_copies = copies_.size();
  Bytes* const born = schedule.born.data();
  Bytes* const dead = schedule.dead.data();
  for (std::size_t copy = 0; copy < copies_.size(); ++copy) {
    const auto [buffer, birth, last_use, last_write, leaves] = copies_[copy];
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
    born[start] += step_.nbytes[buffer];
    dead[stop] += step_.nbytes[buffer];
  }
}

}  // namespace lmswap::planner
