#include "search.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <tuple>

namespace lmswap::planner {
namespace {

constexpr Bytes kNever = std::int64_t{1} << 62;

// How much worse, as a share of the plan's cost over the unlimited step, annealing accepts at first. Of the U-Net at
// 192³ (H200; bf16 and unfused, 30 and 40 % of the peak; 8 seeds each) three of four end further from the bound with
// 0.03, all of them with 0.3; 0.05 to 0.1 are alike.
constexpr double kHeat = 0.07;

}  // namespace

Search::Search(const Step& step, const Link& link, const Limits& limits, unsigned seed)
    : step_(step),
      link_(link),
      limits_(limits),
      scheduler_(step),
      placer_(step, link, limits.budget_bytes, limits.tier_bytes),
      seed_(seed),
      random_(seed) {
  constexpr Bytes kTypical = Bytes{1} << 24;
  copy_price_ = (link.out.seconds(kTypical) + link.in.seconds(kTypical)) / static_cast<double>(kTypical);
  free_seconds_ = std::accumulate(step.seconds.begin(), step.seconds.end(), 0.0);
  find_gaps();
}

void Search::find_gaps() {
  const int num_gaps = step_.num_gaps();
  allowed_.assign(num_gaps, 1);
  buffer_of_.assign(num_gaps, 0);
  plain_.assign(num_gaps, Fate::kKeep);
  const auto bit = [](Fate fate) { return static_cast<Mask>(1 << static_cast<int>(fate)); };
  for (int buffer = 0; buffer < step_.num_buffers(); ++buffer) {
    const auto uses = step_.uses[buffer];
    for (std::size_t k = 0; k < uses.size(); ++k) {
      const int gap = step_.first_gap[buffer] + static_cast<int>(k);
      buffer_of_[gap] = buffer;
      const bool is_tail = k + 1 == uses.size();
      if (step_.life[buffer] != Life::kActivation || step_.nbytes[buffer] == 0) continue;
      if (!is_tail && uses[k + 1] == uses[k] + 1) continue;
      const int next = is_tail ? -1 : step_.segment_of[uses[k + 1]];
      if (limits_.may_swap && step_.nbytes[buffer] >= limits_.min_swap_bytes &&
          (is_tail || step_.hands_on(step_.segment_of[uses[k]], next))) {
        allowed_[gap] = static_cast<Mask>(allowed_[gap] | bit(Fate::kSwap) | bit(Fate::kSwapAgain));
      }
      const int producer = step_.producer[buffer];
      if (limits_.may_redo && producer >= 0 && step_.repeatable[producer] &&
          (is_tail || step_.hands_on(step_.segment_of[producer], next))) {
        allowed_[gap] = static_cast<Mask>(allowed_[gap] | bit(Fate::kRedo) | bit(Fate::kRedoAgain));
        if (is_tail) plain_[gap] = Fate::kRedoAgain;
      }
      if (allowed_[gap] == 1) continue;
      movable_.push_back(gap);
    }
  }
  std::stable_sort(movable_.begin(), movable_.end(),
                   [&](int a, int b) { return step_.nbytes[buffer_of_[a]] > step_.nbytes[buffer_of_[b]]; });
  leave_out_small();
  find_classes();
}

void Search::find_classes() {
  std::map<std::tuple<Bytes, double, int, std::size_t>, std::vector<int>> classes;
  for (const int gap : movable_) {
    const int buffer = buffer_of_[gap], producer = step_.producer[buffer];
    const double made_in = producer >= 0 ? step_.seconds[producer] : -1;
    classes[{step_.nbytes[buffer], made_in, gap - step_.first_gap[buffer], step_.uses[buffer].size()}].push_back(gap);
  }
  for (auto& [key, gaps] : classes) {
    std::sort(gaps.begin(), gaps.end(),
              [&](int a, int b) { return step_.producer[buffer_of_[a]] < step_.producer[buffer_of_[b]]; });
    classes_.push_back(std::move(gaps));
  }
}

// The smallest gaps, 0.1 % of the bytes together, are only chosen where a repair needs them.
void Search::leave_out_small() {
  const auto bytes_of = [&](int gap) { return step_.nbytes[buffer_of_[gap]]; };
  Bytes total = 0;
  for (const int gap : movable_) total += bytes_of(gap);
  Bytes small = 0;
  while (!movable_.empty() && (small += bytes_of(movable_.back())) <= total / 1000) movable_.pop_back();
}

bool Search::is_done() const {
  return evaluations_ >= most_evaluations_ || (best_.score.excess_bytes == 0 && best_.score.seconds <= target_seconds_);
}

Search::Score Search::evaluate(const std::vector<Fate>& fates, double most_seconds) {
  ++evaluations_;
  most_seconds *= 1 + 1e-9;  // sums in another order differ by rounding
  if (!scheduler_.build(fates, most_seconds - free_seconds_, schedule_)) {
    last_ = {kNever, -1, 0, 0};
  } else {
    last_ = place(most_seconds);
  }
  const Score score{last_.excess_bytes, last_.seconds};
  if (best_.fates.empty() || score < best_.score) best_ = {fates, score};
  return score;
}

// A third to a half of all schedules were evaluated before: different actions often give the same schedule.
Outcome Search::place(double most_seconds) {
  const auto [known, is_new] = placed_.try_emplace(schedule_.key);
  auto& outcome = known->second;
  if (is_new || (std::isinf(outcome.seconds) && outcome.least_seconds <= most_seconds)) {
    outcome = placer_.place(schedule_, most_seconds);
  }
  return outcome.least_seconds > most_seconds ? too_slow(outcome.least_seconds) : outcome;
}

Found Search::run(int most_evaluations, double target_seconds) {
  most_evaluations_ = most_evaluations;
  target_seconds_ = target_seconds;
  start();
  // A plan for less memory fits here as well: so more memory seldom makes a plan worse.
  for (const double share : {0.96, 0.9}) {
    auto limits = limits_;
    limits.budget_bytes = static_cast<Bytes>(share * static_cast<double>(limits.budget_bytes));
    Search tighter(step_, link_, limits, seed_);
    tighter.most_evaluations_ = most_evaluations / 8;
    tighter.target_seconds_ = target_seconds;
    tighter.start();
    tighter.improve();
    if (is_done()) break;
    starts_.push_back({tighter.best_.fates, evaluate(tighter.best_.fates)});
    evaluations_ += tighter.evaluations_;
  }
  improve();
  prune();
  return answer();
}

// The best actions as a plan.
Found Search::answer() {
  Found found;
  found.evaluations = evaluations_;
  found.excess_bytes = best_.score.excess_bytes;
  found.fits = found.excess_bytes == 0;
  found.seconds = best_.score.seconds;
  scheduler_.build(best_.fates, kAnySeconds, schedule_);
  const auto outcome = placer_.place(schedule_, kAnySeconds, &found.swaps);
  if (!found.fits) {
    found.worst_op = schedule_.runs[outcome.worst_run].op;
    return found;
  }
  for (const auto& run : schedule_.runs) {
    if (run.is_rerun()) found.reruns.push_back({run.op, run.position});
  }
  return found;
}

// Anneals from the best starts, then from the best of all. Trying every other action of every gap in between took a
// fourth of all evaluations, and gained less. On the U-Net at 192³ (bf16, H200, 42 to 50 % of the peak)
// one start alone ended 1 to 2 % of step time higher than six with the same number of evaluations.
void Search::improve() {
  split_classes();
  std::sort(starts_.begin(), starts_.end(), [](const Candidate& a, const Candidate& b) { return a.score < b.score; });
  const int left = most_evaluations_ - evaluations_;
  for (std::size_t number = 0; number < std::min<std::size_t>(starts_.size(), 6) && !is_done(); ++number) {
    anneal(starts_[number], left / 15);
  }
  for (int round = 1; round <= 3 && !is_done(); ++round) anneal(best_, left / 8);
  anneal(best_, most_evaluations_ - evaluations_);
}

// Evicts the buffers that are cheapest to recompute, up to some share of the bytes; then the cheapest where needed.
void Search::start() {
  evaluate(plain_);
  std::vector<std::pair<double, int>> prices;  // seconds a byte
  for (const int gap : movable_) {
    const int buffer = buffer_of_[gap];
    const bool is_tail = gap + 1 == step_.first_gap[buffer + 1];
    if (is_tail || !allows(gap, Fate::kRedo)) continue;
    prices.emplace_back(step_.seconds[step_.producer[buffer]] / static_cast<double>(step_.nbytes[buffer]), gap);
  }
  std::sort(prices.begin(), prices.end());
  for (const double share : {0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9}) {
    const auto count = static_cast<std::size_t>(share * static_cast<double>(prices.size()));
    for (const bool again : {false, true}) {
      for (const double swap_price : {0.0, 0.02, 0.1, 0.5}) {
        if (is_done()) return;
        auto fates = plain_;
        for (std::size_t index = 0; index < count; ++index) {
          fates[prices[index].second] = again ? Fate::kRedoAgain : Fate::kRedo;
        }
        const auto score = repair(fates, swap_price, again, 60);
        starts_.push_back({fates, score});
      }
    }
  }
}

// Evicts, at the worst run, the buffer that is cheapest per byte, until the step fits or none is left.
Search::Score Search::repair(std::vector<Fate>& fates, double swap_price, bool again, int most, double most_seconds) {
  auto score = evaluate(fates, most_seconds);
  struct Option {
    double price;
    int gap;
    Fate fate;
    Bytes nbytes;
  };
  std::vector<Option> options;
  while (score.excess_bytes > 0 && last_.worst_run >= 0 && --most > 0 && !is_done()) {
    options.clear();
    for (const auto& stretch : schedule_.stretches) {
      if (stretch.leaves || stretch.after >= last_.worst_run || stretch.before <= last_.worst_run) continue;
      const int buffer = stretch.buffer;
      const Bytes nbytes = step_.nbytes[buffer];
      const Fate now = fates[stretch.gap];
      if (nbytes == 0) continue;
      for (int number = 1; number < kNumFates; ++number) {
        const Fate fate = static_cast<Fate>(number);
        const bool is_again = fate == Fate::kSwapAgain || fate == Fate::kRedoAgain;
        // A swapped buffer that is resident here was prefetched early.
        if (!allows(stretch.gap, fate) || fate == now || is_again != (again || now != Fate::kKeep)) continue;
        if (now == Fate::kSwapAgain || now == Fate::kRedoAgain) continue;
        const double seconds =
            swaps(fate) ? swap_price * copy_price_ * static_cast<double>(nbytes) : redo_seconds(fates, buffer, 6);
        options.push_back({seconds / static_cast<double>(nbytes), stretch.gap, fate, nbytes});
      }
    }
    if (options.empty()) break;
    std::sort(options.begin(), options.end(),
              [](const Option& a, const Option& b) { return std::tie(a.price, a.gap) < std::tie(b.price, b.gap); });
    Bytes sent = 0;
    for (const auto& option : options) {
      if (sent >= score.excess_bytes) break;
      if (fates[option.gap] == option.fate || (fates[option.gap] != Fate::kKeep && sent > 0)) continue;
      fates[option.gap] = option.fate;
      sent += option.nbytes;
    }
    if (sent == 0) break;
    score = evaluate(fates, most_seconds);
  }
  return score;
}

// Of recomputing a buffer, with those of its inputs that are not resident.
double Search::redo_seconds(const std::vector<Fate>& fates, int buffer, int depth) const {
  const int producer = step_.producer[buffer];
  if (producer < 0) return 0;
  double seconds = step_.seconds[producer];
  if (depth == 0) return seconds;
  for (const int input : step_.reads[producer]) {
    if (step_.life[input] == Life::kActivation && redoes(fates[step_.first_gap[input + 1] - 1])) {
      seconds += redo_seconds(fates, input, depth - 1) / 2;
    }
  }
  return seconds;
}

// Changes a gap or two at random, evicts others where memory is not enough, and accepts worse plans less and less
// often.
void Search::anneal(Candidate current, int evaluations) {
  const int begin = evaluations_, stop = std::min(most_evaluations_, evaluations_ + evaluations);
  std::uniform_real_distribution<double> uniform(0, 1);
  int idle = 0;  // tries in a row without a change: a step may have no choices left
  while (!movable_.empty() && evaluations_ < stop && !is_done() && idle < 100) {
    const double heat = 1 - static_cast<double>(evaluations_ - begin) / static_cast<double>(stop - begin);
    auto tried = current;
    const double kind = uniform(random_);
    const int changes = kind < 0.35 ? 1 : kind < 0.6 ? 2 : 0;
    bool changed = changes == 0 && forget(tried.fates);
    for (int change = 0; change < changes; ++change) {
      const int gap = pick(current);
      const auto fate = static_cast<Fate>(static_cast<int>(uniform(random_) * kNumFates));
      changed = changed || (allows(gap, fate) && tried.fates[gap] != fate);
      if (allows(gap, fate)) tried.fates[gap] = fate;
    }
    idle = changed ? 0 : idle + 1;
    if (!changed) continue;
    // The accepted increase is drawn first: an evaluation that is certain to exceed it is aborted.
    const double price = std::pow(10.0, -3 * uniform(random_)), again = uniform(random_), draw = uniform(random_);
    const double worse = -std::log(draw + 1e-300) * (kHeat * heat * heat + 1e-9);
    const double most_seconds = current.score.excess_bytes > 0
                                    ? kAnySeconds
                                    : current.score.seconds + worse * (current.score.seconds - free_seconds_ + 1e-12);
    tried.score = repair(tried.fates, price, again < 0.5, 6, most_seconds);
    const bool take = tried.score.excess_bytes == current.score.excess_bytes ? tried.score.seconds <= most_seconds
                                                                             : tried.score < current.score;
    if (take) current = std::move(tried);
  }
}

// Keeps all buffers computed around some op, or idle for about as long: repair may find a better joint choice for them
// than flips of single gaps.
bool Search::forget(std::vector<Fate>& fates) {
  std::uniform_real_distribution<double> uniform(0, 1);
  const int middle = static_cast<int>(uniform(random_) * step_.num_ops());
  const int reach = 1 + static_cast<int>(std::pow(uniform(random_), 2) * step_.num_ops() / 8);
  bool changed = false;
  for (const int gap : movable_) {
    if (fates[gap] == plain_[gap]) continue;
    const int made = step_.producer[buffer_of_[gap]];
    if (made < middle - reach || made > middle + reach) continue;
    fates[gap] = plain_[gap];
    changed = true;
  }
  return changed;
}

// A gap to try another action for: of two recomputes of the last schedule the dearer one, an evicted one, or any.
int Search::pick(const Candidate& current) {
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
      if (!run.is_rerun()) continue;
      if (found >= 0 && step_.seconds[run.op] <= most) break;
      most = step_.seconds[run.op];
      if (found >= 0) return run.gap;
      found = run.gap;
    }
    if (found >= 0) return found;
  }
  for (int attempt = 0; kind < 0.6 && attempt < 40; ++attempt) {
    const int gap = movable_[any(movable_.size())];
    if (current.fates[gap] != plain_[gap]) return gap;
  }
  return movable_[static_cast<std::size_t>(std::pow(uniform(random_), 2) * static_cast<double>(movable_.size()))];
}

// Equal layers get one action up to some layer, and another from there on.
void Search::split_classes() {
  auto fates = best_.fates;
  auto score = best_.score;
  for (const auto& gaps : classes_) {
    if (gaps.size() < 3) continue;
    for (int number = 0; number < kNumFates; ++number) {
      const Fate fate = static_cast<Fate>(number);
      if (!allows(gaps[0], fate)) continue;
      for (const std::size_t share : {4U, 2U, 1U}) {
        for (const bool from_start : {true, false}) {
          if (is_done()) return;
          auto changed = fates;
          const std::size_t count = gaps.size() * share / 4;
          for (std::size_t index = 0; index < count; ++index) {
            const int gap = from_start ? gaps[index] : gaps[gaps.size() - 1 - index];
            if (allows(gap, fate)) changed[gap] = fate;
          }
          const auto tried = evaluate(changed, score.excess_bytes > 0 ? kAnySeconds : score.seconds);
          if (tried < score) {
            score = tried;
            fates = std::move(changed);
          }
        }
      }
    }
  }
}

// Keeps buffers that need not be evicted.
void Search::prune() {
  if (best_.score.excess_bytes > 0) return;
  auto fates = best_.fates;
  int left = most_evaluations_ / 10;
  for (int gap = 0; gap < step_.num_gaps(); ++gap) {
    if (fates[gap] == plain_[gap] || --left < 0) continue;
    const Fate now = fates[gap];
    fates[gap] = plain_[gap];
    const auto tried = evaluate(fates, best_.score.seconds);
    if (best_.score < tried) {
      fates[gap] = now;
    } else {
      best_ = {fates, tried};
    }
  }
}

}  // namespace lmswap::planner
