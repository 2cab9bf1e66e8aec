#include "predict.h"

#include <algorithm>
#include <tuple>

namespace lmswap::planner {
namespace {

// In the order in which those at one position happen.
enum class SwapEvent : std::uint8_t { kOutStart, kRelease, kInStart, kFirstUse };

using Entry = std::tuple<int, SwapEvent, std::size_t>;  // position, event, number of the swap

// Events of the next step count from its start; what is released at the step's end has the position `num_runs`.
std::vector<Entry> events_of(const std::vector<Swap>& swaps, int num_runs) {
  std::vector<Entry> events;
  events.reserve(4 * swaps.size());
  for (std::size_t number = 0; number < swaps.size(); ++number) {
    const auto& swap = swaps[number];
    const int out_shift = swap.release <= num_runs ? 0 : num_runs, in_shift = swap.in_start < num_runs ? 0 : num_runs;
    if (swap.out_start >= 0) events.emplace_back(swap.out_start - out_shift, SwapEvent::kOutStart, number);
    events.emplace_back(swap.release - out_shift, SwapEvent::kRelease, number);
    events.emplace_back(swap.in_start - in_shift, SwapEvent::kInStart, number);
    events.emplace_back(swap.first_use - in_shift, SwapEvent::kFirstUse, number);
  }
  std::sort(events.begin(), events.end());
  return events;
}

}  // namespace

double predict(const Step& step, const Link& link, const SearchResult& plan) {
  std::vector<int> runs;                    // ops
  std::vector<Bytes> nbytes = step.nbytes;  // by version: those of recomputes follow
  auto recompute = plan.recomputes.begin();
  for (int op = 0; op < step.num_ops(); ++op) {
    for (; recompute != plan.recomputes.end() && recompute->position == op; ++recompute) {
      runs.push_back(recompute->op);
      for (const int buffer : step.writes[recompute->op]) nbytes.push_back(step.nbytes[buffer]);
    }
    runs.push_back(op);
  }
  const int num_runs = static_cast<int>(runs.size());
  const auto events = events_of(plan.swaps, num_runs);
  auto event = events.begin();
  std::vector<double> out_ends(plan.swaps.size(), 0), in_ends(plan.swaps.size(), 0);
  double clock = 0, out_end = 0, in_end = 0, queued = 0;
  const auto wait = [&](double until) { clock = std::max(clock, until); };
  const auto queue = [&](double seconds) {
    queued += seconds;
    if (seconds > 0) wait(queued);
  };
  for (int at = 0; at <= num_runs; ++at) {
    for (; event != events.end() && std::get<0>(*event) == at; ++event) {
      const auto [position, kind, number] = *event;
      const bool is_in = kind == SwapEvent::kInStart;
      if (kind == SwapEvent::kRelease) wait(out_ends[number]);
      if (kind == SwapEvent::kFirstUse) wait(in_ends[number]);
      if (kind != SwapEvent::kOutStart && !is_in) continue;
      queue(link.host_copy_seconds);
      const auto version = static_cast<std::size_t>(plan.swaps[number].version);
      (is_in ? in_ends : out_ends)[number] = queue_copy(link, is_in, nbytes[version], clock, out_end, in_end);
    }
    if (at == num_runs) break;
    queue(link.host_op_seconds);
    clock = compute_end(link, step.seconds[runs[at]], clock, out_end, in_end);
  }
  return clock;
}

}  // namespace lmswap::planner
