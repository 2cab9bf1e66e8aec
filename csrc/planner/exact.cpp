#include "exact.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <queue>
#include <string>
#include <unordered_map>

namespace lmswap::planner {
namespace {

using Set = std::uint32_t;  // of activations, by their number among the activations

enum class Act : std::uint8_t { kOut, kRelease, kDrop, kIn, kRun, kRerun };

struct State {
  int next = 0;              // the op of the step that has not run
  int rank = 0;              // of the last action since the last run: outs, then releases, then ins
  int last = -1;             // within one rank of releases, the last buffer: their order makes no difference
  bool is_at_border = true;  // nothing has run in the segment of `next`
  Set here = 0, copied = 0, arriving = 0;
  double clock = 0, out_end = 0, in_end = 0, queued = 0;
  std::array<double, kMostExactBuffers> copied_at{}, arrives_at{};
  std::array<std::int8_t, kMostExactBuffers> used_in{}, copied_in{}, arrived_in{};  // segments
  int parent = -1;
  Act act = Act::kRun;
  int what = -1;  // buffer or op
};

class Exact {
 public:
  Exact(const Step& step, const Link& link, const Limits& limits) : step_(step), link_(link), limits_(limits) {}
  std::optional<Found> run(int most_states);

 private:
  bool prepare();
  void expand(int number);
  void move_buffers(int number);
  void run_next(int number);
  void run_again(int number, int op);
  bool use(State& state, const Rows::Row& buffers, int segment) const;
  void add(State state, int parent, Act act, int what);
  [[nodiscard]] bool is_dominated(const State& state);
  [[nodiscard]] std::string key(const State& state) const;
  [[nodiscard]] Bytes bytes(Set set) const;
  [[nodiscard]] double copy(State& state, bool is_in, Bytes nbytes) const;
  void compute(State& state, int op) const;
  [[nodiscard]] double least_seconds(const State& state) const { return state.clock + seconds_left_[state.next]; }
  [[nodiscard]] bool has_number(int buffer) const { return number_of_[buffer] >= 0; }
  [[nodiscard]] Set bit(int buffer) const { return Set{1} << number_of_[buffer]; }
  [[nodiscard]] Found trace(int number) const;

  const Step& step_;
  const Link& link_;
  const Limits& limits_;
  std::vector<int> buffers_;                      // activations, by number
  std::vector<int> number_of_;                    // by buffer, or -1
  std::vector<Bytes> base_before_, base_during_;  // by op: bytes of other buffers than activations
  std::vector<double> seconds_left_;
  std::vector<int> last_use_;    // by number
  std::vector<char> may_rerun_;  // by op
  std::vector<State> states_;
  std::unordered_map<std::string, std::vector<int>> known_;
  using Entry = std::pair<double, int>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;
};

bool Exact::prepare() {
  number_of_.assign(step_.nbytes.size(), -1);
  Bytes all = 0;
  for (int buffer = 0; buffer < step_.num_buffers(); ++buffer) {
    if (step_.life[buffer] != Life::kActivation || step_.nbytes[buffer] == 0 || step_.producer[buffer] < 0) continue;
    number_of_[buffer] = static_cast<int>(buffers_.size());
    buffers_.push_back(buffer);
    last_use_.push_back(step_.uses[buffer][step_.uses[buffer].size() - 1]);
    all += step_.nbytes[buffer] + 4096;
  }
  if (buffers_.size() > kMostExactBuffers || all > limits_.tier_bytes) return false;
  const auto num_ops = step_.seconds.size();
  base_before_.assign(num_ops + 1, 0);
  base_during_.assign(num_ops + 1, 0);
  for (int buffer = 0; buffer < step_.num_buffers(); ++buffer) {
    const auto uses = step_.uses[buffer];
    if (step_.life[buffer] == Life::kActivation || uses.size() == 0) continue;
    std::size_t start = uses[0], stop = num_ops;
    const bool is_tangent = step_.life[buffer] == Life::kTangent;
    if (step_.life[buffer] == Life::kToLastUse) stop = static_cast<std::size_t>(uses[uses.size() - 1]) + 1;
    if (is_tangent) {
      start = step_.segments[step_.segment_of[uses[0]]].start;
      stop = step_.segments[step_.segment_of[uses[uses.size() - 1]]].stop;
    }
    for (std::size_t op = start; op < stop; ++op) {
      base_during_[op] += step_.nbytes[buffer];
      if (is_tangent || op > start) base_before_[op] += step_.nbytes[buffer];
    }
  }
  seconds_left_.assign(num_ops + 1, 0);
  may_rerun_.assign(num_ops, 0);
  for (std::size_t op = num_ops; op-- > 0;) {
    seconds_left_[op] = seconds_left_[op + 1] + step_.seconds[op];
    bool may = limits_.may_redo && step_.repeatable[op];
    for (const int buffer : step_.writes[static_cast<int>(op)]) may = may && step_.life[buffer] == Life::kActivation;
    may_rerun_[op] = may;
  }
  return true;
}

std::optional<Found> Exact::run(int most_states) {
  if (!prepare()) return std::nullopt;
  add({}, -1, Act::kRun, -1);
  while (!queue_.empty()) {
    const int number = queue_.top().second;
    queue_.pop();
    if (states_[number].next == step_.num_ops()) return trace(number);
    if (static_cast<int>(states_.size()) > most_states) return std::nullopt;
    expand(number);
  }
  return Found{};
}

void Exact::expand(int number) {
  move_buffers(number);
  run_next(number);
  const int segment = step_.segment_of[states_[number].next];
  for (int op = 0; op < states_[number].next; ++op) {
    if (may_rerun_[op] && step_.hands_on(step_.segment_of[op], segment)) run_again(number, op);
  }
}

void Exact::move_buffers(int number) {
  const State now = states_[number];
  const int segment = step_.segment_of[now.next];
  for (int index = 0; index < static_cast<int>(buffers_.size()); ++index) {
    const Set self = Set{1} << index;
    const Bytes nbytes = step_.nbytes[buffers_[index]];
    const bool is_here = (now.here & self) != 0, is_copied = (now.copied & self) != 0;
    const bool is_arriving = (now.arriving & self) != 0;
    const int used_in = now.used_in[index];
    // A copy out belongs to the segment of the last use: at its end, the next segment may have begun, but no run in it.
    const bool may_leave = used_in == segment || (now.is_at_border && used_in == segment - 1);
    // A backward directly after its forward can receive the buffer with the copy, and release it.
    const bool may_be_released = may_leave || (used_in == segment - 1 && step_.hands_on(used_in, segment));
    if (now.rank == 0 && is_here && !is_copied && !is_arriving && may_leave && limits_.may_swap &&
        nbytes >= limits_.min_swap_bytes) {
      State out = now;
      out.copied |= self;
      out.copied_at[index] = copy(out, false, nbytes);
      out.copied_in[index] = static_cast<std::int8_t>(used_in);
      add(out, number, Act::kOut, index);
    }
    if (now.rank <= 1 && is_here && !is_arriving && (now.rank < 1 || index > now.last)) {
      State gone = now;
      gone.rank = 1;
      gone.last = index;
      gone.here &= ~self;
      if (is_copied && may_be_released && now.copied_in[index] == used_in) {
        gone.clock = std::max(gone.clock, gone.copied_at[index]);
        add(gone, number, Act::kRelease, index);
        gone.clock = now.clock;
      }
      gone.copied &= ~self;
      const int producer = step_.producer[buffers_[index]];
      if (last_use_[index] < now.next || may_rerun_[producer]) add(gone, number, Act::kDrop, index);
    }
    if (!is_here && is_copied && step_.hands_on(used_in, segment)) {
      State back = now;
      back.rank = 2;
      back.here |= self;
      back.arriving |= self;
      back.arrives_at[index] = copy(back, true, nbytes);
      back.arrived_in[index] = static_cast<std::int8_t>(segment);
      add(back, number, Act::kIn, index);
    }
  }
}

// Waits for prefetches; false if a buffer is non-resident, or was prefetched for another segment.
bool Exact::use(State& state, const Rows::Row& buffers, int segment) const {
  for (const int buffer : buffers) {
    if (!has_number(buffer)) continue;
    const int index = number_of_[buffer];
    if ((state.here & bit(buffer)) == 0) return false;
    if ((state.arriving & bit(buffer)) != 0) {
      if (state.arrived_in[index] != segment) return false;
      state.clock = std::max(state.clock, state.arrives_at[index]);
      state.arriving &= ~bit(buffer);
      state.copied_in[index] = static_cast<std::int8_t>(segment);  // its host copy was passed to this segment with it
    }
    state.used_in[index] = static_cast<std::int8_t>(segment);
  }
  return true;
}

void Exact::run_next(int number) {
  State after = states_[number];
  const int op = after.next, segment = step_.segment_of[op];
  if (!use(after, step_.reads[op], segment)) return;
  for (const int buffer : step_.writes[op]) {
    if (!has_number(buffer)) continue;
    if (step_.producer[buffer] != op && (after.here & bit(buffer)) == 0) return;
    after.here |= bit(buffer);
    after.copied &= ~bit(buffer);
    after.used_in[number_of_[buffer]] = static_cast<std::int8_t>(segment);
  }
  if (bytes(after.here) + base_during_[op] + step_.scratch_bytes[op] > limits_.budget_bytes) return;
  compute(after, op);
  ++after.next;
  after.is_at_border = after.next < step_.num_ops() && step_.segment_of[after.next] != segment;
  after.rank = 0;
  after.last = -1;
  add(after, number, Act::kRun, op);
}

void Exact::run_again(int number, int op) {
  State after = states_[number];
  const int segment = step_.segment_of[after.next];
  Set made = 0;
  for (const int buffer : step_.writes[op]) made |= has_number(buffer) ? bit(buffer) : 0;
  if ((made & ~after.here) == 0 || (made & after.arriving) != 0) return;
  if (!use(after, step_.reads[op], segment)) return;
  after.here |= made;
  after.copied &= ~made;
  for (const int buffer : step_.writes[op]) {
    if (has_number(buffer)) after.used_in[number_of_[buffer]] = static_cast<std::int8_t>(segment);
  }
  if (bytes(after.here) + base_before_[after.next] + step_.scratch_bytes[op] > limits_.budget_bytes) return;
  compute(after, op);
  after.is_at_border = false;
  after.rank = 0;
  after.last = -1;
  add(after, number, Act::kRerun, op);
}

void Exact::add(State state, int parent, Act act, int what) {
  state.parent = parent;
  state.act = act;
  state.what = what;
  if (is_dominated(state)) return;
  queue_.emplace(least_seconds(state), static_cast<int>(states_.size()));
  states_.push_back(state);
}

bool Exact::is_dominated(const State& state) {
  auto& others = known_[key(state)];
  const auto no_later = [&](const State& a, const State& b) {
    if (a.clock > b.clock || a.out_end > b.out_end || a.in_end > b.in_end || a.queued > b.queued) return false;
    for (std::size_t index = 0; index < buffers_.size(); ++index) {
      const Set self = Set{1} << index;
      if ((a.copied & self) != 0 && std::max(a.copied_at[index], a.clock) > std::max(b.copied_at[index], b.clock)) {
        return false;
      }
      if ((a.arriving & self) != 0 && a.arrives_at[index] > b.arrives_at[index]) return false;
    }
    return true;
  };
  for (const int other : others) {
    if (no_later(states_[other], state)) return true;
  }
  std::erase_if(others, [&](int other) { return no_later(state, states_[other]); });
  others.push_back(static_cast<int>(states_.size()));
  return false;
}

std::string Exact::key(const State& state) const {
  std::string text;
  const auto put = [&](auto value) { text.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  put(state.next);
  put(state.rank);
  put(state.last);
  put(state.is_at_border);
  put(state.here);
  put(state.copied);
  put(state.arriving);
  for (std::size_t index = 0; index < buffers_.size(); ++index) {
    const Set self = Set{1} << index;
    put(((state.here | state.copied) & self) != 0 ? state.used_in[index] : std::int8_t{-1});
    put((state.copied & self) != 0 ? state.copied_in[index] : std::int8_t{-1});
    put((state.arriving & self) != 0 ? state.arrived_in[index] : std::int8_t{-1});
  }
  return text;
}

Bytes Exact::bytes(Set set) const {
  Bytes sum = 0;
  for (std::size_t index = 0; index < buffers_.size(); ++index) {
    if ((set >> index & 1) != 0) sum += step_.nbytes[buffers_[index]];
  }
  return sum;
}

double Exact::copy(State& state, bool is_in, Bytes nbytes) const {
  state.queued += link_.host_copy_seconds;
  state.clock = std::max(state.clock, state.queued);
  return queue_copy(link_, is_in, nbytes, state.clock, state.out_end, state.in_end);
}

void Exact::compute(State& state, int op) const {
  state.queued += link_.host_op_seconds;
  const double start = std::max(state.clock, state.queued);
  state.clock = compute_end(link_, step_.seconds[op], start, state.out_end, state.in_end);
}

// Follows the parents back, and converts the actions to a plan.
Found Exact::trace(int number) const {
  std::vector<int> path;
  for (int at = number; at > 0; at = states_[at].parent) path.push_back(at);
  std::reverse(path.begin(), path.end());
  Found found;
  found.fits = true;
  found.seconds = states_[number].clock;
  found.evaluations = static_cast<int>(states_.size());
  int run = 0, next = 0, made = step_.num_buffers();
  std::vector<int> copy_of(buffers_);               // by number: which copy of the buffer is the newest
  std::vector<int> out_start(buffers_.size(), -1);  // of a copy out that no swap has listed yet
  std::vector<Swap> away(buffers_.size(), Swap{-1, -1, -1, -1, -1});
  const auto use_at = [&](const Rows::Row& buffers) {
    for (const int buffer : buffers) {
      if (!has_number(buffer)) continue;
      auto& swap = away[number_of_[buffer]];
      if (swap.in_start < 0) continue;
      swap.first_use = run;
      found.swaps.push_back(swap);
      swap = {-1, -1, -1, -1, -1};
    }
  };
  for (const int at : path) {
    const auto [act, what] = std::pair{states_[at].act, states_[at].what};
    if (act == Act::kOut) out_start[what] = run;
    if (act == Act::kRelease) {
      away[what] = {copy_of[what], out_start[what], run, -1, -1};
      out_start[what] = -1;
    }
    if (act == Act::kIn) away[what].in_start = run;
    if (act != Act::kRun && act != Act::kRerun) continue;
    use_at(step_.reads[what]);
    if (act == Act::kRun) {
      use_at(step_.writes[what]);
      next = what + 1;
    } else {
      found.reruns.push_back({what, next});
      for (const int buffer : step_.writes[what]) {
        const int index = number_of_[buffer];
        if (index >= 0) {
          copy_of[index] = made;
          out_start[index] = -1;
          away[index] = {-1, -1, -1, -1, -1};
        }
        ++made;
      }
    }
    ++run;
  }
  std::stable_sort(found.swaps.begin(), found.swaps.end(),
                   [](const Swap& a, const Swap& b) { return a.first_use < b.first_use; });
  return found;
}

}  // namespace

std::optional<Found> find_exactly(const Step& step, const Link& link, const Limits& limits, int most_states) {
  return Exact(step, link, limits).run(most_states);
}

}  // namespace lmswap::planner
