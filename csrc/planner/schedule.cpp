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
  for (int buffer = 0; buffer < step.num_buffers(); ++buffer) {
    const bool is_persistent = step.is_persistent(buffer);
    resident_at_start_.push_back(step.lifetime[buffer] == Lifetime::kTangent || is_persistent);
    if (is_persistent) persistent_.push_back(buffer);
  }
  std::vector<int> uses_so_far(step.nbytes.size(), 0);
  for (int op = 0; op < step.num_ops(); ++op) {
    first_step_use_.push_back(step_uses_.size());
    const auto add = [&](int buffer, bool is_write) {
      // An op that reads what it writes uses it once.
      const auto begin = step_uses_.begin() + static_cast<std::ptrdiff_t>(first_step_use_[op]);
      const auto last = std::find_if(begin, step_uses_.end(), [&](const StepUse& use) { return use.buffer == buffer; });
      if (last != step_uses_.end()) {
        last->is_write = last->is_write || is_write;
        return;
      }
      const int number = uses_so_far[buffer]++;
      const bool is_first = number == 0 && !step.is_persistent(buffer);
      step_uses_.push_back({buffer, step.first_gap[buffer] + number, is_write, is_first});
    };
    for (const int buffer : step.reads[op]) add(buffer, false);
    for (const int buffer : step.writes[op]) add(buffer, true);
  }
  first_step_use_.push_back(step_uses_.size());
}

bool Scheduler::build(const std::vector<Action>& actions, double max_recompute_seconds, Schedule& schedule) {
  actions_ = &actions;
  out_ = &schedule;
  const auto num_buffers = step_.nbytes.size();
  schedule.runs.clear();
  schedule.idle_intervals.clear();
  schedule.segment_start.clear();
  schedule.segment_stop.clear();
  schedule.key = 0;
  versions_.assign(num_buffers, Version{-1, -1, -1, -1, false});
  newest_.assign(num_buffers, -1);
  is_resident_ = resident_at_start_;
  pin_counts_.assign(num_buffers, 0);
  gap_.assign(step_.first_gap.begin(), step_.first_gap.end() - 1);
  for (const int buffer : persistent_) {
    newest_[buffer] = buffer;
    versions_[buffer] = {buffer, 0, -1, -1, false};
    if (step_.uses[buffer].size() == 0) continue;
    gap_[buffer] = step_.end_gap(buffer);
    const Action action = actions[gap_[buffer]];
    versions_[buffer].is_swapped = is_swap(action) || action == Action::kSwapNext;
  }
  max_runs_ = static_cast<std::size_t>(kMaxRunsPerOp) * step_.seconds.size() + 64;
  recompute_seconds_left_ = max_recompute_seconds;
  depth_ = 0;
  for (const auto& segment : step_.segments) {
    schedule.segment_start.push_back(static_cast<int>(schedule.runs.size()));
    for (int op = segment.start; op < segment.stop; ++op) {
      if (!run(op)) return false;
    }
    schedule.segment_stop.push_back(static_cast<int>(schedule.runs.size()));
  }
  add_end_intervals();
  sum_lifetimes();
  return true;
}

// Runs an op of the step itself, at its position.
bool Scheduler::run(int op) {
  if (!ensure_inputs_resident(op, op)) return false;
  const int at = static_cast<int>(out_->runs.size());
  out_->runs.push_back({op, op, -1});
  const auto* const actions = actions_->data();
  for (std::size_t number = first_step_use_[op]; number < first_step_use_[op + 1]; ++number) {
    const auto [buffer, gap, is_write, is_first] = step_uses_[number];
    if (is_first) {
      create(buffer, at);
      if (!is_write) versions_[buffer].last_write = -1;
    } else {
      use(buffer, at, is_write);
    }
    const Action action = actions[gap];
    gap_[buffer] = gap;
    versions_[newest_[buffer]].is_swapped = is_swap(action);
    is_resident_[buffer] = !is_recompute(action);
  }
  return true;
}

bool Scheduler::recompute_op(int op, int position, int gap) {
  recompute_seconds_left_ -= step_.seconds[op];
  if (recompute_seconds_left_ < 0 || out_->runs.size() >= max_runs_ || ++depth_ > kMaxDepth) return false;
  for (const int buffer : step_.reads[op]) {
    if (step_.is_written_between(buffer, op, position)) return false;
  }
  if (!ensure_inputs_resident(op, position)) return false;
  const int at = static_cast<int>(out_->runs.size());
  out_->runs.push_back({op, position, gap});
  out_->key = extend(out_->key, op, at);
  for (const int buffer : step_.reads[op]) use(buffer, at, false);
  for (const int buffer : step_.writes[op]) create(buffer, at);
  for (const int buffer : step_.reads[op]) apply_action_after_recompute(buffer);
  for (const int buffer : step_.writes[op]) apply_action_after_recompute(buffer);
  --depth_;
  return true;
}

// Recomputes the inputs of an op that are not resident.
inline bool Scheduler::ensure_inputs_resident(int op, int position) {
  bool are_resident = true;
  for (const int buffer : step_.reads[op]) are_resident = are_resident && is_resident_[buffer] != 0;
  if (are_resident) return true;
  for (const int buffer : step_.reads[op]) ++pin_counts_[buffer];
  for (const int buffer : step_.reads[op]) {
    if (!ensure_resident(buffer, position)) return false;
  }
  for (const int buffer : step_.reads[op]) --pin_counts_[buffer];
  return true;
}

inline bool Scheduler::ensure_resident(int buffer, int position) {
  if (is_resident_[buffer] != 0) return true;
  return recompute_op(step_.producer[buffer], position, gap_[buffer]);
}

inline void Scheduler::use(int buffer, int at, bool is_write) {
  const int version = newest_[buffer];
  auto& last = versions_[version];
  // What is offloaded when the step starts is prefetched also for the first run.
  const bool starts_offloaded = last.last_use < 0 && is_swap((*actions_)[gap_[buffer]]);
  if (at > last.last_use + 1 || starts_offloaded) {
    out_->idle_intervals.push_back(
        {buffer, version, gap_[buffer], last.last_use, at, last.last_write, last.is_swapped, starts_offloaded});
    if (last.is_swapped) out_->key = extend(out_->key, -1 - version, at);
  }
  last.last_use = at;
  if (is_write) last.last_write = at;
}

inline void Scheduler::create(int buffer, int at) {
  int version = buffer;
  if (versions_[buffer].birth >= 0) {
    version = static_cast<int>(versions_.size());
    versions_.push_back({});
  }
  versions_[version] = {buffer, at, at, at, false};
  newest_[buffer] = version;
  is_resident_[buffer] = 1;
}

inline void Scheduler::apply_action_after_recompute(int buffer) {
  const Action action = (*actions_)[gap_[buffer]];
  versions_[newest_[buffer]].is_swapped = action == Action::kSwapAgain;
  if (action == Action::kRecomputeAgain && pin_counts_[buffer] == 0) is_resident_[buffer] = 0;
}

// Adds the intervals of persistent buffers after their last uses. What is swapped back is waited for before the last
// run: no copy is under way at the end.
void Scheduler::add_end_intervals() {
  const int num_runs = static_cast<int>(out_->runs.size());
  for (const bool are_back : {true, false}) {  // in order of `next_use`
    for (const int buffer : persistent_) {
      const int gap = step_.end_gap(buffer), next_use = are_back ? num_runs - 1 : num_runs;
      const auto& last = versions_[buffer];
      if (last.last_use < 0) continue;
      const Action action = (*actions_)[gap];
      const bool is_back = action == Action::kSwapBack && last.last_use + 2 < num_runs;
      if (is_back != are_back) continue;
      const bool ends_offloaded = is_swap(action), is_swapped = is_back || ends_offloaded;
      out_->idle_intervals.push_back(
          {buffer, buffer, gap, last.last_use, next_use, last.last_write, is_swapped, false, ends_offloaded});
      if (is_swapped) out_->key = extend(out_->key, -1 - buffer, next_use);
    }
  }
}

void Scheduler::sum_lifetimes() {
  auto& schedule = *out_;
  const auto num_runs = schedule.runs.size();
  schedule.allocated_bytes.assign(num_runs + 1, 0);
  schedule.freed_bytes.assign(num_runs + 1, 0);
  schedule.num_versions = versions_.size();
  Bytes* const allocated_bytes = schedule.allocated_bytes.data();
  Bytes* const freed_bytes = schedule.freed_bytes.data();
  for (std::size_t version = 0; version < versions_.size(); ++version) {
    const auto [buffer, birth, last_use, last_write, is_swapped] = versions_[version];
    if (birth < 0) continue;  // no op uses it
    auto stop = static_cast<std::size_t>(last_use + 1);
    auto start = static_cast<std::size_t>(birth);
    if (version < step_.nbytes.size()) {
      if (step_.lifetime[buffer] == Lifetime::kToEnd) stop = num_runs;
      if (step_.is_persistent(buffer)) stop = num_runs;
      if (step_.lifetime[buffer] == Lifetime::kTangent) {
        const auto uses = step_.uses[buffer];
        start = schedule.segment_start[step_.segment_of[uses[0]]];
        stop = schedule.segment_stop[step_.segment_of[uses[uses.size() - 1]]];
      }
    }
    allocated_bytes[start] += step_.nbytes[buffer];
    freed_bytes[stop] += step_.nbytes[buffer];
  }
}

}  // namespace lmswap::planner
