// The search for plans on random steps: it is deterministic and never better than the exact search.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "exact.h"
#include "search.h"

namespace lmswap::planner {
namespace {

struct Case {
  Step step;
  Link link;
};

// A chain forward, with skips, and its mirror backward, as training makes them.
Case random_case(unsigned seed, int depth) {
  std::mt19937 random(seed);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  std::vector<std::vector<int>> reads, writes;
  Case made;
  auto& step = made.step;
  for (int op = 0; op < 2 * depth; ++op) {
    std::vector<int> read;
    if (op > 0) read.push_back(op - 1);
    if (op > 3 && draw(0, 3) == 0) read.push_back(draw(0, op - 3));
    if (op >= depth && 2 * depth - 2 - op >= 0) read.push_back(2 * depth - 2 - op);
    std::sort(read.begin(), read.end());
    read.erase(std::unique(read.begin(), read.end()), read.end());
    reads.push_back(read);
    writes.push_back({op});
    step.seconds.push_back(draw(0, 8));
    step.scratch_bytes.push_back(draw(0, 5) == 0 ? draw(1, 3) : 0);
    step.repeatable.push_back(draw(0, 4) > 0 ? 1 : 0);
    step.nbytes.push_back(draw(0, 9));
    const int kind = draw(0, 14);
    step.lifetime.push_back(kind == 0 ? Lifetime::kToEnd : kind == 1 ? Lifetime::kToLastUse : Lifetime::kActivation);
  }
  step.reads = Rows(reads);
  step.writes = Rows(writes);
  step.segments = {{0, depth, -1}, {depth, 2 * depth, 0}};
  step.derive();
  made.link = {
      {{{1, 1.0 / draw(1, 4)}, {1000, 1000.0 / draw(1, 4)}}}, {{{1, 1.0}, {1000, 1000.0}}}, 1.0, draw(1, 2) / 2.0};
  return made;
}

Bytes peak_of(const Step& step) {
  Scheduler scheduler(step);
  Schedule schedule;
  EXPECT_TRUE(scheduler.build(std::vector<Action>(step.num_gaps(), Action::kKeep), 0, schedule));
  Bytes held = 0, peak = 0;
  for (std::size_t at = 0; at < schedule.runs.size(); ++at) {
    held += schedule.allocated_bytes[at] - schedule.freed_bytes[at];
    peak = std::max(peak, held + step.scratch_bytes[schedule.runs[at].op]);
  }
  return peak;
}

Limits limits_of(const Case& random, int percent, int prefetches_ahead = 0) {
  return {peak_of(random.step) * percent / 100, Bytes{1} << 40, 1, true, true, prefetches_ahead};
}

class AnyStep : public testing::TestWithParam<int> {};

TEST_P(AnyStep, IsPlannedDeterministically) {
  const auto random = random_case(static_cast<unsigned>(GetParam()), 20);
  for (const int percent : {80, 60, 40}) {
    const auto limits = limits_of(random, percent);
    const auto first = Search(random.step, random.link, limits, {}, 1).run(1500, 0);
    const auto second = Search(random.step, random.link, limits, {}, 1).run(1500, 0);
    EXPECT_EQ(first.seconds, second.seconds);
    EXPECT_EQ(first.fits, second.fits);
    EXPECT_EQ(first.swaps.size(), second.swaps.size());
    EXPECT_EQ(first.recomputes.size(), second.recomputes.size());
  }
}

TEST_P(AnyStep, IsNeverPlannedFasterThanExactly) {
  const auto random = random_case(static_cast<unsigned>(GetParam()), 4);
  for (const int percent : {80, 60, 40}) {
    const auto limits = limits_of(random, percent);
    const auto exact = find_exactly(random.step, random.link, limits, 200'000);
    if (!exact) continue;
    for (const int prefetches_ahead : {0, 1, 16}) {
      const auto ahead = limits_of(random, percent, prefetches_ahead);
      const auto found = Search(random.step, random.link, ahead, {}, 1).run(500, 0);
      if (!found.fits) continue;
      EXPECT_TRUE(exact->fits);
      EXPECT_GE(found.seconds, exact->seconds * (1 - 1e-9));
    }
  }
}

TEST_P(AnyStep, CopiesAreScheduledTheSameForEqualKeys) {
  const auto random = random_case(static_cast<unsigned>(GetParam()), 20);
  const auto limits = limits_of(random, 80);
  Scheduler scheduler(random.step);
  const int prefetches_ahead = GetParam() % 3;
  CopyScheduler copy_scheduler(random.step, random.link, limits.budget_bytes, limits.tier_bytes, prefetches_ahead);
  std::mt19937 draw(1);
  std::map<std::uint64_t, Outcome> outcomes;
  int repeats = 0;
  for (int tries = 0; tries < 300; ++tries) {
    std::vector<Action> actions(random.step.num_gaps(), Action::kKeep);
    for (int change = 0; change < 2; ++change)
      actions[draw() % actions.size()] = static_cast<Action>(draw() % kNumActions);
    Schedule schedule;
    if (!scheduler.build(actions, 1e9, schedule)) continue;
    const auto outcome = copy_scheduler.schedule(schedule, 1e9);
    const auto [known, is_new] = outcomes.try_emplace(schedule.key, outcome);
    EXPECT_EQ(known->second.excess_bytes, outcome.excess_bytes);
    EXPECT_EQ(known->second.seconds, outcome.seconds);
    repeats += is_new ? 0 : 1;
    if (outcome.excess_bytes > 0) continue;
    // Aborted below the known lower bound, and only there.
    EXPECT_GT(copy_scheduler.schedule(schedule, outcome.min_seconds * (1 - 1e-9) - 1e-9).seconds, outcome.seconds);
    EXPECT_EQ(copy_scheduler.schedule(schedule, outcome.min_seconds).seconds, outcome.seconds);
  }
  EXPECT_GT(repeats, 0);
}

// What is planned is the same under a sanitizer, which looks at the memory of some steps only.
#ifdef __SANITIZE_ADDRESS__
constexpr int kNumSteps = 8;
#else
constexpr int kNumSteps = 40;
#endif

INSTANTIATE_TEST_SUITE_P(Random, AnyStep, testing::Range(0, kNumSteps));

}  // namespace
}  // namespace lmswap::planner
