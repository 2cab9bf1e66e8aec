#include "search.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace lmswap::planner {
namespace {

constexpr Bytes kInfeasibleBytes = std::int64_t{1} << 62;

// How much worse, as a share of the plan's cost over the unlimited step, annealing accepts at first. Of the U-Net at
// 192³ (H200; bf16 and unfused, 30 and 40 % of the peak; 8 seeds each) three of four end further from the bound with
// 0.03, all of them with 0.3; 0.05 to 0.1 are alike.
constexpr double kInitialTemperature = 0.07;

// Of the costs that are used without prices; distinguishes actions that cost the same at those of the bound.
constexpr double kUnpricedShare = 0.05;

// Copies can hide behind compute where the proven seconds are within this factor of compute's.
constexpr double kHiddenCopies = 1.01;

}  // namespace

Search::Search(const Step& step, const Link& link, const Limits& limits, Prices prices, unsigned seed)
    : step_(step),
      link_(link),
      limits_(limits),
      prices_(std::move(prices)),
      scheduler_(step),
      copy_scheduler_(step, link, limits.budget_bytes, limits.tier_bytes, limits.prefetches_ahead),
      seed_(seed),
      random_(seed) {
  constexpr Bytes kTypical = Bytes{1} << 24;
  copy_seconds_per_byte_ = (link.out.seconds(kTypical) + link.in.seconds(kTypical)) / static_cast<double>(kTypical);
  compute_seconds_ = std::accumulate(step.seconds.begin(), step.seconds.end(), 0.0);
  op_starts_.assign(1, 0.0);
  std::partial_sum(step.seconds.begin(), step.seconds.end(), std::back_inserter(op_starts_));
  find_gaps();
  if (is_cyclic_ && !prices_.cuts.empty()) price_actions();
}

void Search::find_gaps() {
  const int num_gaps = step_.num_gaps();
  allowed_.assign(num_gaps, 1);
  buffer_of_.assign(num_gaps, 0);
  default_actions_.assign(num_gaps, Action::kKeep);
  const auto bit = [](Action action) { return static_cast<Mask>(1 << static_cast<int>(action)); };
  for (int buffer = 0; buffer < step_.num_buffers(); ++buffer) {
    const auto uses = step_.uses[buffer];
    for (std::size_t k = 0; k < uses.size(); ++k) {
      const int gap = step_.first_gap[buffer] + static_cast<int>(k);
      buffer_of_[gap] = buffer;
      const bool is_tail = k + 1 == uses.size();
      if (!step_.is_swappable(buffer)) continue;
      if (!is_tail && uses[k + 1] == uses[k] + 1) continue;
      if (is_tail && step_.is_persistent(buffer)) {
        if (!limits_.may_swap || step_.nbytes[buffer] < limits_.min_swap_bytes) continue;
        if (uses[0] == 0 && uses[k] + 1 == step_.num_ops()) continue;
        allowed_[gap] = static_cast<Mask>(allowed_[gap] | bit(Action::kSwap));
        if (step_.is_fetched(buffer)) {
          fetched_.push_back(buffer);
        } else {
          if (uses[0] > 0) allowed_[gap] = static_cast<Mask>(allowed_[gap] | bit(Action::kSwapNext));
          const double left_seconds = op_starts_[step_.num_ops() - 1] - op_starts_[uses[k] + 1];
          if (link_.in.seconds(step_.nbytes[buffer]) <= left_seconds) {
            allowed_[gap] = static_cast<Mask>(allowed_[gap] | bit(Action::kSwapBack));
          }
        }
        evictable_gaps_.push_back(gap);
        is_cyclic_ = true;
        continue;
      }
      const int next_use = is_tail ? -1 : uses[k + 1];
      // What is in use at both ends of a step cannot be swapped over its end.
      const bool is_always_used =
          step_.is_fetched(buffer) && uses[0] == 0 && uses[uses.size() - 1] + 1 == step_.num_ops();
      if (limits_.may_swap && step_.nbytes[buffer] >= limits_.min_swap_bytes && !is_always_used &&
          (is_tail || step_.is_shared(buffer) ||
           step_.can_pass(step_.segment_of[uses[k]], step_.segment_of[next_use]))) {
        allowed_[gap] = static_cast<Mask>(allowed_[gap] | bit(Action::kSwap) | bit(Action::kSwapAgain));
      }
      if (may_recompute(buffer, next_use)) {
        allowed_[gap] = static_cast<Mask>(allowed_[gap] | bit(Action::kRecompute) | bit(Action::kRecomputeAgain));
        if (is_tail) default_actions_[gap] = Action::kRecomputeAgain;
      }
      if (allowed_[gap] == 1) continue;
      evictable_gaps_.push_back(gap);
    }
  }
  std::stable_sort(evictable_gaps_.begin(), evictable_gaps_.end(),
                   [&](int a, int b) { return step_.nbytes[buffer_of_[a]] > step_.nbytes[buffer_of_[b]]; });
  exclude_small();
  find_classes();
}

// Whether a buffer can be recomputed for its next use; after its last one, which has none, as an input of recomputes.
bool Search::may_recompute(int buffer, int next_use) const {
  const int producer = step_.producer[buffer];
  if (!limits_.may_recompute || producer < 0 || !step_.repeatable[producer]) return false;
  const int segment = step_.segment_of[producer];
  if (next_use >= 0 && !step_.can_pass(segment, step_.segment_of[next_use])) return false;
  // It is certain to fail after the update of a weight that its op reads, and with it all else that a plan recomputes.
  const int until = next_use >= 0 ? next_use : step_.segments[segment].stop;
  const auto inputs = step_.reads[producer];
  return std::none_of(inputs.begin(), inputs.end(),
                      [&](int input) { return step_.is_written_between(input, producer, until); });
}

void Search::find_classes() {
  class_of_.assign(step_.num_gaps(), 0);
  std::map<std::tuple<Bytes, double, int, std::size_t>, std::vector<int>> classes;
  for (const int gap : evictable_gaps_) {
    const int buffer = buffer_of_[gap], producer = step_.producer[buffer];
    const double producer_seconds = producer >= 0 ? step_.seconds[producer] : -1;
    classes[{step_.nbytes[buffer], producer_seconds, gap - step_.first_gap[buffer], step_.uses[buffer].size()}]
        .push_back(gap);
  }
  for (auto& [key, gaps] : classes) {
    std::sort(gaps.begin(), gaps.end(),
              [&](int a, int b) { return begins_at(buffer_of_[a]) < begins_at(buffer_of_[b]); });
    for (const int gap : gaps) class_of_[gap] = classes_.size();
    classes_.push_back(std::move(gaps));
  }
}

// The smallest gaps, 0.1 % of the bytes together, are only chosen where a repair needs them.
void Search::exclude_small() {
  const auto bytes_of = [&](int gap) { return step_.nbytes[buffer_of_[gap]]; };
  Bytes total = 0;
  for (const int gap : evictable_gaps_) total += bytes_of(gap);
  Bytes small = 0;
  while (!evictable_gaps_.empty() && (small += bytes_of(evictable_gaps_.back())) <= total / 1000)
    evictable_gaps_.pop_back();
}

bool Search::is_done() const {
  const auto& [excess_bytes, seconds] = best_.score;
  return evaluations_ >= max_evaluations_ ||
         (excess_bytes == 0 ? seconds <= target_seconds_ : excess_bytes <= tolerated_excess_bytes_);
}

Search::Score Search::evaluate(const std::vector<Action>& actions, double max_seconds) {
  ++evaluations_;
  max_seconds *= 1 + 1e-9;  // sums in another order differ by rounding
  if (!scheduler_.build(with_fetches(actions), max_seconds - compute_seconds_, schedule_)) {
    last_outcome_ = {kInfeasibleBytes, -1, 0, 0};
  } else {
    last_outcome_ = schedule_copies(max_seconds);
  }
  const Score score{last_outcome_.excess_bytes, last_outcome_.seconds};
  if (best_.actions.empty() || score < best_.score) best_ = {actions, score};
  return score;
}

// Swaps what is fetched over the step's end, too, where it is swapped in another gap.
const std::vector<Action>& Search::with_fetches(const std::vector<Action>& actions) {
  if (fetched_.empty()) return actions;
  with_fetches_ = actions;
  for (const int buffer : fetched_) {
    const auto begin = with_fetches_.begin() + step_.first_gap[buffer],
               end = with_fetches_.begin() + step_.end_gap(buffer);
    if (std::any_of(begin, end, is_swap)) *end = Action::kSwap;
  }
  return with_fetches_;
}

// A third to a half of all schedules were evaluated before: different actions often give the same schedule.
Outcome Search::schedule_copies(double max_seconds) {
  const auto [known, is_new] = outcomes_.try_emplace(schedule_.key);
  auto& outcome = known->second;
  if (is_new || (std::isinf(outcome.seconds) && outcome.min_seconds <= max_seconds)) {
    outcome = copy_scheduler_.schedule(schedule_, max_seconds);
  }
  return outcome.min_seconds > max_seconds ? too_slow(outcome.min_seconds) : outcome;
}

SearchResult Search::run(int max_evaluations, double target_seconds, Bytes tolerated_excess_bytes) {
  max_evaluations_ = max_evaluations;
  target_seconds_ = target_seconds;
  tolerated_excess_bytes_ = tolerated_excess_bytes;
  start();
  // A plan for less memory fits here as well: so more memory seldom makes a plan worse.
  for (const double share : {0.96, 0.9}) {
    if (is_done()) break;
    auto limits = limits_;
    limits.budget_bytes = static_cast<Bytes>(share * static_cast<double>(limits.budget_bytes));
    Search tighter(step_, link_, limits, prices_, seed_);
    tighter.max_evaluations_ = max_evaluations / 8;
    tighter.target_seconds_ = target_seconds;
    tighter.start();
    tighter.improve();
    starts_.push_back({tighter.best_.actions, evaluate(tighter.best_.actions)});
    evaluations_ += tighter.evaluations_;
  }
  improve();
  prune();
  return build_result();
}

// The best actions as a plan.
SearchResult Search::build_result() {
  SearchResult found;
  found.evaluations = evaluations_;
  found.excess_bytes = best_.score.excess_bytes;
  found.fits = found.excess_bytes == 0;
  found.seconds = best_.score.seconds;
  scheduler_.build(with_fetches(best_.actions), kAnySeconds, schedule_);
  const auto outcome = copy_scheduler_.schedule(schedule_, kAnySeconds, &found.swaps);
  if (!found.fits) {
    found.worst_op = schedule_.runs[outcome.worst_run].op;
    return found;
  }
  for (const auto& run : schedule_.runs) {
    if (run.is_recompute()) found.recomputes.push_back({run.op, run.position});
  }
  return found;
}

// Anneals from the best starts, then from the best of all. Trying every other action of every gap in between took a
// fourth of all evaluations, and gained less. On the U-Net at 192³ (bf16, H200, 42 to 50 % of the peak)
// one start alone ended 1 to 2 % of step time higher than six with the same number of evaluations.
void Search::improve() {
  split_classes();
  std::sort(starts_.begin(), starts_.end(), [](const Candidate& a, const Candidate& b) { return a.score < b.score; });
  const int left = max_evaluations_ - evaluations_;
  for (std::size_t number = 0; number < std::min<std::size_t>(starts_.size(), 6) && !is_done(); ++number) {
    anneal(starts_[number], left / 15);
  }
  for (int round = 1; round <= 3 && !is_done(); ++round) anneal(best_, left / 8);
  anneal(best_, max_evaluations_ - evaluations_);
}

// How long compute waits at least for the copy in of a buffer by a swap in a gap, which is not under way at the step's
// end. Where the lanes take longer than compute it waits anyway, for as many copies in other gaps.
double Search::stall_seconds(int gap, Action action) const {
  if (target_seconds_ > kHiddenCopies * compute_seconds_) return 0;
  const int buffer = buffer_of_[gap];
  const auto uses = step_.uses[buffer];
  const auto next = static_cast<std::size_t>(gap - step_.first_gap[buffer]) + 1;
  const double last_end = op_starts_[uses[next - 1] + 1];
  const double idle_seconds = next < uses.size()            ? op_starts_[uses[next]] - last_end
                              : action == Action::kSwapBack ? op_starts_[step_.num_ops() - 1] - last_end
                                                            : op_starts_[uses[0]];
  return std::max(0.0, link_.in.seconds(step_.nbytes[buffer]) - idle_seconds);
}

// Prices all allowed actions once: each repair looks at many of them.
void Search::price_actions() {
  priced_.resize(allowed_.size());
  for (int gap = 0; gap < step_.num_gaps(); ++gap) {
    for (int number = 1; number < kNumActions; ++number) {
      const Action action = static_cast<Action>(number);
      if (allows(gap, action)) priced_[gap][number] = priced_seconds(gap, action);
    }
  }
}

// What evicting a buffer in a gap costs more than keeping it, at the prices of the bound: copies, where they are
// cheapest, or the recompute, less the memory at the cuts.
double Search::priced_seconds(int gap, Action action) const {
  const int buffer = buffer_of_[gap];
  const auto uses = step_.uses[buffer];
  const auto use = static_cast<std::size_t>(gap - step_.first_gap[buffer]);
  const bool is_tail = use + 1 == uses.size();
  if (is_tail && !step_.is_persistent(buffer)) return 0;
  const auto& cuts = prices_.cuts;
  const auto zone_before = [&](int op) {
    return static_cast<int>(std::lower_bound(cuts.begin(), cuts.end(), op) - cuts.begin());
  };
  const auto zone_after = [&](int op) { return zone_before(op + 1); };
  const auto held = [&](int from_zone, int to_zone) {  // at the cuts between them
    double seconds = 0;
    for (int cut = from_zone; cut < to_zone; ++cut) seconds += prices_.memory[cut];
    return seconds * static_cast<double>(step_.nbytes[buffer]);
  };
  const int num_cuts = static_cast<int>(cuts.size()), left = zone_after(uses[use]);
  const bool is_over_end = is_tail && is_swap(action);
  const int begin = is_over_end || action == Action::kSwapNext ? 0 : left;
  const int end = !is_tail ? zone_before(uses[use + 1]) : action == Action::kSwapBack ? num_cuts : zone_before(uses[0]);
  const double saved = is_over_end ? held(left, num_cuts) : 0;
  if (is_recompute(action)) {
    const double price = std::max(0.0, 1 - prices_.out[end] - prices_.in[end]);
    return price * step_.seconds[step_.producer[buffer]] - held(begin, end);
  }
  double copies = std::numeric_limits<double>::infinity();
  for (int zone = begin; zone <= end; ++zone) {
    copies = std::min(copies, prices_.in[zone] * link_.in.seconds(step_.nbytes[buffer]) - held(begin, zone));
  }
  if (!step_.is_persistent(buffer) || step_.last_write[buffer] >= 0) {
    copies += prices_.out[is_over_end ? left : begin] * link_.out.seconds(step_.nbytes[buffer]);
  }
  return copies - saved;
}

// Swaps what costs less at the bound's prices than keeping it, by some share of its copy in.
void Search::start_by_prices() {
  for (const double share : {0.5, 0.1, 0.01}) {
    auto actions = default_actions_;
    for (const int gap : evictable_gaps_) {
      double least = -share * link_.in.seconds(step_.nbytes[buffer_of_[gap]]);
      for (const Action action : {Action::kSwap, Action::kSwapNext, Action::kSwapBack}) {
        const double seconds = priced_[gap][static_cast<int>(action)];
        if (seconds >= least) continue;
        least = seconds;
        actions[gap] = action;
      }
    }
    if (is_done()) return;
    const auto score = repair(actions, 0.1, false, 60);
    starts_.push_back({actions, score});
  }
}

// Swaps a share of the gaps over the step's end, and a share of the other gaps of buffers that every segment can use,
// evenly among equal layers: so that no part of the step waits for more copies than others.
void Search::start_evenly() {
  constexpr int kParts = 8;
  for (int over_end = 0; over_end <= kParts; ++over_end) {
    for (int inside = 0; inside <= kParts; ++inside) {
      auto actions = default_actions_;
      for (const auto& gaps : classes_) {
        const int buffer = buffer_of_[gaps[0]];
        if (!step_.is_shared(buffer) || !allows(gaps[0], Action::kSwap)) continue;
        const bool is_over_end = step_.is_persistent(buffer) && gaps[0] == step_.end_gap(buffer);
        int sum = kParts / 2;
        for (const int gap : gaps) {
          sum += is_over_end ? over_end : inside;
          for (const Action action : {Action::kSwap, Action::kSwapBack}) {
            if (sum < kParts || !allows(gap, action) || stall_seconds(gap, action) > 0) continue;
            actions[gap] = action;
            break;
          }
          sum %= kParts;
        }
      }
      if (is_done()) return;
      const auto score = repair(actions, 0.1, false, 8);
      starts_.push_back({actions, score});
    }
  }
}

// Evicts the buffers that are cheapest to recompute, up to some share of the bytes; then the cheapest where needed.
void Search::start() {
  evaluate(default_actions_);
  if (!priced_.empty()) start_by_prices();
  if (is_cyclic_) start_evenly();
  std::vector<std::pair<double, int>> costs;  // seconds a byte
  for (const int gap : evictable_gaps_) {
    const int buffer = buffer_of_[gap];
    const bool is_tail = gap + 1 == step_.first_gap[buffer + 1];
    if (is_tail || !allows(gap, Action::kRecompute)) continue;
    costs.emplace_back(step_.seconds[step_.producer[buffer]] / static_cast<double>(step_.nbytes[buffer]), gap);
  }
  std::sort(costs.begin(), costs.end());
  for (const double share : {0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9}) {
    const auto count = static_cast<std::size_t>(share * static_cast<double>(costs.size()));
    for (const bool evict_again : {false, true}) {
      for (const double swap_weight : {0.0, 0.02, 0.1, 0.5}) {
        if (is_done()) return;
        auto actions = default_actions_;
        for (std::size_t index = 0; index < count; ++index) {
          actions[costs[index].second] = evict_again ? Action::kRecomputeAgain : Action::kRecompute;
        }
        const auto score = repair(actions, swap_weight, evict_again, 60);
        starts_.push_back({actions, score});
      }
    }
  }
}

// Evicts, at the worst run, the buffer that is cheapest per byte, until the step fits or none is left.
Search::Score Search::repair(std::vector<Action>& actions, double swap_weight, bool evict_again, int max_tries,
                             double max_seconds) {
  auto score = evaluate(actions, max_seconds);
  struct Option {
    double seconds_per_byte;
    int gap;
    Action action;
    Bytes nbytes;
  };
  std::vector<Option> options;
  while (score.excess_bytes > 0 && last_outcome_.worst_run >= 0 && --max_tries > 0 && !is_done()) {
    options.clear();
    for (const auto& interval : schedule_.idle_intervals) {
      if (interval.is_swapped || interval.last_use >= last_outcome_.worst_run ||
          interval.next_use <= last_outcome_.worst_run)
        continue;
      const int buffer = interval.buffer;
      const Bytes nbytes = step_.nbytes[buffer];
      const Action now = actions[interval.gap];
      if (nbytes == 0) continue;
      for (int number = 1; number < kNumActions; ++number) {
        const Action action = static_cast<Action>(number);
        if (!allows(interval.gap, action) || !evicts(interval, now, action, evict_again)) continue;
        double seconds = is_recompute(action) ? recompute_seconds(actions, buffer, 6)
                                              : swap_weight * copy_seconds_per_byte_ * static_cast<double>(nbytes);
        // Equal layers have equal prices: any of them may be the one to choose. What nothing writes is not copied out.
        if (step_.is_shared(buffer)) seconds *= 1 + std::uniform_real_distribution<double>(0, 1)(random_);
        if (step_.is_persistent(buffer) && step_.last_write[buffer] < 0) seconds /= 2;
        if (step_.is_shared(buffer) && !is_recompute(action)) seconds += stall_seconds(interval.gap, action);
        if (!priced_.empty()) seconds = kUnpricedShare * seconds + priced_[interval.gap][number];
        options.push_back({seconds / static_cast<double>(nbytes), interval.gap, action, nbytes});
      }
    }
    if (options.empty()) break;
    std::sort(options.begin(), options.end(), [](const Option& a, const Option& b) {
      return std::tie(a.seconds_per_byte, a.gap) < std::tie(b.seconds_per_byte, b.gap);
    });
    Bytes evicted_bytes = 0;
    for (const auto& option : options) {
      if (evicted_bytes >= score.excess_bytes) break;
      if (actions[option.gap] == option.action || (actions[option.gap] != Action::kKeep && evicted_bytes > 0)) continue;
      actions[option.gap] = option.action;
      evicted_bytes += option.nbytes;
    }
    if (evicted_bytes == 0) break;
    score = evaluate(actions, max_seconds);
  }
  return score;
}

// Whether `action` instead of `now` would evict a buffer from an interval in which it is resident.
bool Search::evicts(const IdleInterval& interval, Action now, Action action, bool evict_again) const {
  if (action == now) return false;
  if (step_.is_persistent(interval.buffer) && interval.gap == step_.end_gap(interval.buffer)) {
    // What is swapped before its first use is resident after its last one.
    const bool is_after_last_use = interval.last_use >= 0;
    if (action == Action::kSwapNext) return now == Action::kKeep && !is_after_last_use;
    if (action == Action::kSwapBack) return now == Action::kKeep && is_after_last_use;
    return now == Action::kKeep || now == (is_after_last_use ? Action::kSwapNext : Action::kSwapBack);
  }
  // A swapped buffer that is resident here was prefetched early.
  const bool is_again = action == Action::kSwapAgain || action == Action::kRecomputeAgain;
  const bool was_again = now == Action::kSwapAgain || now == Action::kRecomputeAgain;
  return is_again == (evict_again || now != Action::kKeep) && !was_again;
}

// Of recomputing a buffer and those of its inputs that are not resident.
double Search::recompute_seconds(const std::vector<Action>& actions, int buffer, int depth) const {
  const int producer = step_.producer[buffer];
  if (producer < 0) return 0;
  double seconds = step_.seconds[producer];
  if (depth == 0) return seconds;
  for (const int input : step_.reads[producer]) {
    if (step_.lifetime[input] == Lifetime::kActivation && is_recompute(actions[step_.first_gap[input + 1] - 1])) {
      seconds += recompute_seconds(actions, input, depth - 1) / 2;
    }
  }
  return seconds;
}

// Changes a gap or two at random, evicts others where memory is not enough, and accepts worse plans less and less
// often.
void Search::anneal(Candidate current, int evaluations) {
  const int begin = evaluations_, stop = std::min(max_evaluations_, evaluations_ + evaluations);
  const int num_actions = is_cyclic_ ? kNumActions : kNumAcyclicActions;
  std::uniform_real_distribution<double> uniform(0, 1);
  int unchanged = 0;  // tries in a row without a change: a step may have no choices left
  while (!evictable_gaps_.empty() && evaluations_ < stop && !is_done() && unchanged < 100) {
    const double temperature = 1 - static_cast<double>(evaluations_ - begin) / static_cast<double>(stop - begin);
    auto tried = current;
    const double kind = uniform(random_);
    const int changes = kind < 0.35 ? 1 : kind < 0.6 ? 2 : 0;
    const bool exchanges = is_cyclic_ && changes > 0 && uniform(random_) < 0.5;
    bool changed = changes == 0 ? reset_around_op(tried.actions) : exchanges && exchange(tried.actions);
    for (int change = 0; change < changes && !exchanges; ++change) {
      const int gap = pick_gap(current);
      const auto action = static_cast<Action>(static_cast<int>(uniform(random_) * num_actions));
      changed = changed || (allows(gap, action) && tried.actions[gap] != action);
      if (allows(gap, action)) tried.actions[gap] = action;
    }
    unchanged = changed ? 0 : unchanged + 1;
    if (!changed) continue;
    // The accepted increase is drawn first: an evaluation that is certain to exceed it is aborted.
    const double swap_weight = std::pow(10.0, -3 * uniform(random_)), again = uniform(random_), draw = uniform(random_);
    const double tolerated = -std::log(draw + 1e-300) * (kInitialTemperature * temperature * temperature + 1e-9);
    const double max_seconds =
        current.score.excess_bytes > 0
            ? kAnySeconds
            : current.score.seconds + tolerated * (current.score.seconds - compute_seconds_ + 1e-12);
    tried.score = repair(tried.actions, swap_weight, again < 0.5, 6, max_seconds);
    const bool is_accepted = tried.score.excess_bytes == current.score.excess_bytes ? tried.score.seconds <= max_seconds
                                                                                    : tried.score < current.score;
    if (is_accepted) current = std::move(tried);
  }
}

// Keeps all buffers computed around some op, or idle for about as long: repair may find a better joint choice for them
// than flips of single gaps.
bool Search::reset_around_op(std::vector<Action>& actions) {
  std::uniform_real_distribution<double> uniform(0, 1);
  const int middle = static_cast<int>(uniform(random_) * step_.num_ops());
  const int reach = 1 + static_cast<int>(std::pow(uniform(random_), 2) * step_.num_ops() / 8);
  bool changed = false;
  for (const int gap : evictable_gaps_) {
    if (actions[gap] == default_actions_[gap]) continue;
    const int begin = begins_at(buffer_of_[gap]);
    if (begin < middle - reach || begin > middle + reach) continue;
    actions[gap] = default_actions_[gap];
    changed = true;
  }
  return changed;
}

// Exchanges the actions of two equal layers: the one that is evicted then suits the copies around it better.
bool Search::exchange(std::vector<Action>& actions) {
  std::uniform_real_distribution<double> uniform(0, 1);
  const auto any = [&](const std::vector<int>& gaps) {
    return gaps[static_cast<std::size_t>(uniform(random_) * static_cast<double>(gaps.size()))];
  };
  for (int attempt = 0; attempt < 40; ++attempt) {
    const int gap = any(evictable_gaps_);
    const int other = any(classes_[class_of_[gap]]);
    if (actions[gap] == actions[other] || !allows(gap, actions[other]) || !allows(other, actions[gap])) continue;
    std::swap(actions[gap], actions[other]);
    return true;
  }
  return false;
}

// A gap to try another action for: of two recomputes of the last schedule the more expensive one, an evicted one, or
// any.
int Search::pick_gap(const Candidate& current) {
  std::uniform_real_distribution<double> uniform(0, 1);
  const auto any = [&](std::size_t count) {
    return static_cast<std::size_t>(uniform(random_) * static_cast<double>(count));
  };
  const double kind = uniform(random_);
  if (kind < 0.4) {
    int found = -1;
    double most = -1;
    for (int attempt = 0; attempt < 40 && !schedule_.runs.empty(); ++attempt) {
      const auto& run = schedule_.runs[any(schedule_.runs.size())];
      if (!run.is_recompute()) continue;
      if (found >= 0 && step_.seconds[run.op] <= most) break;
      most = step_.seconds[run.op];
      if (found >= 0) return run.gap;
      found = run.gap;
    }
    if (found >= 0) return found;
  }
  for (int attempt = 0; kind < 0.6 && attempt < 40; ++attempt) {
    const int gap = evictable_gaps_[any(evictable_gaps_.size())];
    if (current.actions[gap] != default_actions_[gap]) return gap;
  }
  return evictable_gaps_[static_cast<std::size_t>(std::pow(uniform(random_), 2) *
                                                  static_cast<double>(evictable_gaps_.size()))];
}

// Equal layers get one action up to some layer, and another from there on.
void Search::split_classes() {
  auto actions = best_.actions;
  auto score = best_.score;
  for (const auto& gaps : classes_) {
    if (gaps.size() < 3) continue;
    for (int number = 0; number < kNumActions; ++number) {
      const Action action = static_cast<Action>(number);
      if (!allows(gaps[0], action)) continue;
      for (const std::size_t share : {4U, 2U, 1U}) {
        for (const bool from_start : {true, false}) {
          if (is_done()) return;
          auto changed = actions;
          const std::size_t count = gaps.size() * share / 4;
          for (std::size_t index = 0; index < count; ++index) {
            const int gap = from_start ? gaps[index] : gaps[gaps.size() - 1 - index];
            if (allows(gap, action)) changed[gap] = action;
          }
          const auto tried = evaluate(changed, score.excess_bytes > 0 ? kAnySeconds : score.seconds);
          if (tried < score) {
            score = tried;
            actions = std::move(changed);
          }
        }
      }
    }
  }
}

// Keeps buffers that need not be evicted.
void Search::prune() {
  if (best_.score.excess_bytes > 0) return;
  auto actions = best_.actions;
  int left = max_evaluations_ / 10;
  for (int gap = 0; gap < step_.num_gaps(); ++gap) {
    if (actions[gap] == default_actions_[gap] || --left < 0) continue;
    const Action now = actions[gap];
    actions[gap] = default_actions_[gap];
    const auto tried = evaluate(actions, best_.score.seconds);
    if (best_.score < tried) {
      actions[gap] = now;
    } else {
      best_ = {actions, tried};
    }
  }
}

}  // namespace lmswap::planner
