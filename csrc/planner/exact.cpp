#include "exact.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <queue>
#include <string>
#include <unordered_map>

namespace lmswap::planner {
namespace {

using Set = std::uint32_t;  // of items, by their numbers

enum class Act : std::uint8_t { kOut, kRelease, kDrop, kIn, kRun, kRerun };

struct State {
  int next = 0;              // the op of the step that has not run
  int rank = 0;              // of the last action since the last run: outs, then releases, then ins
  int last = -1;             // within one rank of releases, the last item: their order makes no difference
  bool is_at_border = true;  // nothing has run in the segment of `next`
  Set here = 0, copied = 0, arriving = 0;
  Set remade = 0;                   // by a recompute: ops read the new copy from then on
  Set fresh = 0;                    // copied out for a trip that has not ended
  Set copied_at_border = 0;         // between two segments: the copy belongs to either
  Set outs = 0, ins = 0, gone = 0;  // queued, and released or dropped, since the last run
  double clock = 0, out_end = 0, in_end = 0, queued = 0;
  double last_in_start = 0;  // of the last of `ins`
  std::array<double, kMostExactItems> copied_at{}, arrives_at{};
  std::array<std::int8_t, kMostExactItems> used_in{}, copied_in{};  // segments
  std::array<Set, kMostExactItems> not_after{};  // items whose trips must not be needed later than this one's
  int parent = -1;
  Act act = Act::kRun;
  int what = -1;  // item or op
};

// An item is a buffer whose place may change: an activation; a gradient that lives to its last use, which recomputes
// may make later; or the copies of an output that recomputes make, where later ops read them.
class Exact {
 public:
  Exact(const Step& step, const Link& link, const Limits& limits) : step_(step), link_(link), limits_(limits) {}
  std::optional<Found> run(int most_states);

 private:
  bool prepare();
  bool number_items();
  void find_needs();
  void expand(int number);
  void move_items(int number);
  void queue_out(int number, int item);
  void leave(int number, int item);
  void queue_in(int number, int item);
  void run_next(int number);
  void run_again(int number, int op);
  bool use(State& state, Set items, int segment) const;
  [[nodiscard]] std::pair<Bytes, Bytes> next_bytes(const State& state) const;
  [[nodiscard]] bool may_stay(const State& state, Set items, Bytes held, int segment) const;
  bool end_run(State& state, int segment, Set made, Bytes other_bytes) const;
  void add(State state, int parent, Act act, int what);
  [[nodiscard]] bool is_dominated(const State& state);
  [[nodiscard]] std::string key(const State& state) const;
  [[nodiscard]] Bytes bytes(Set set) const;
  [[nodiscard]] Set items(const Rows::Row& buffers) const;
  [[nodiscard]] Set present(const State& state) const { return ~later_copies_ | state.remade; }
  [[nodiscard]] double copy(State& state, bool is_in, Bytes nbytes) const;
  void compute(State& state, int op) const;
  [[nodiscard]] double least_seconds(const State& state) const;
  [[nodiscard]] bool is_copy_for(const State& state, int item, int segment) const;
  [[nodiscard]] Found trace(int number) const;

  const Step& step_;
  const Link& link_;
  const Limits& limits_;
  std::vector<int> buffers_;  // by item
  std::vector<int> item_of_;  // by buffer, or -1
  Set activations_ = 0;
  Set later_copies_ = 0;                          // items of outputs: they exist once they are recomputed
  std::vector<Bytes> base_before_, base_during_;  // by op: bytes of other buffers
  std::vector<Bytes> rerun_bytes_;                // by op: of its results that are no items, once more
  std::vector<Set> reads_, makes_, writes_;       // by op; `writes_` are those that others made
  std::vector<double> seconds_left_;              // by op
  std::vector<Set> needed_;                       // by next op: items that it or later ones use, recomputes included
  std::vector<std::vector<int>> next_use_;        // by item and next op: the next op of the step that uses it, or -1
  std::vector<int> last_use_;    // by item: the last op of the step that uses it; its end, if recomputes do
  std::vector<char> may_rerun_;  // by op
  std::vector<int> previous_;    // by segment: the one before it that has ops, or -1
  std::vector<State> states_;
  std::unordered_map<std::string, std::vector<int>> known_;
  using Entry = std::pair<double, int>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;
};

template <typename Call>
void each(Set set, Call call) {
  for (; set != 0; set &= set - 1) call(std::countr_zero(set));
}

constexpr Set bit(int item) { return Set{1} << item; }

bool Exact::number_items() {
  const int num_ops = step_.num_ops();
  may_rerun_.assign(num_ops, 0);
  std::vector<char> is_reread(step_.nbytes.size(), 0);  // a recompute may read it
  for (int op = 0; op < num_ops; ++op) {
    may_rerun_[op] = limits_.may_redo && step_.repeatable[op] && step_.writes[op].size() > 0;
    for (const int buffer : step_.reads[op]) is_reread[buffer] = is_reread[buffer] || may_rerun_[op];
  }
  item_of_.assign(step_.nbytes.size(), -1);
  for (int buffer = 0; buffer < step_.num_buffers(); ++buffer) {
    const int producer = step_.producer[buffer];
    if (step_.nbytes[buffer] == 0 || producer < 0 || step_.life[buffer] == Life::kTangent) continue;
    const bool is_used_later = step_.uses[buffer].size() > 1;
    if (step_.life[buffer] == Life::kToEnd && !(may_rerun_[producer] && is_used_later)) continue;
    if (step_.life[buffer] == Life::kToLastUse && !may_rerun_[producer] && !is_reread[buffer]) continue;
    if (buffers_.size() == kMostExactItems) return false;
    const int item = item_of_[buffer] = static_cast<int>(buffers_.size());
    if (step_.life[buffer] == Life::kActivation) activations_ |= bit(item);
    if (step_.life[buffer] == Life::kToEnd) later_copies_ |= bit(item);
    buffers_.push_back(buffer);
    const auto uses = step_.uses[buffer];
    last_use_.push_back(is_reread[buffer] ? num_ops : uses[uses.size() - 1]);
  }
  return true;
}

bool Exact::prepare() {
  const int num_ops = step_.num_ops();
  if (step_.segments.size() > 127 || !number_items()) return false;
  Bytes all = 0;
  for (const int buffer : buffers_) all += step_.nbytes[buffer] + 4096;
  if (all > limits_.tier_bytes) return false;
  base_before_.assign(num_ops + 1, 0);
  base_during_.assign(num_ops + 1, 0);
  rerun_bytes_.assign(num_ops, 0);
  for (int buffer = 0; buffer < step_.num_buffers(); ++buffer) {
    const auto uses = step_.uses[buffer];
    const Life life = step_.life[buffer];
    if (uses.size() == 0 || (item_of_[buffer] >= 0 && life != Life::kToEnd)) continue;
    int start = uses[0], stop = life == Life::kToEnd ? num_ops : uses[uses.size() - 1] + 1;
    const bool is_tangent = life == Life::kTangent;
    if (is_tangent) {
      start = step_.segments[step_.segment_of[uses[0]]].start;
      stop = step_.segments[step_.segment_of[uses[uses.size() - 1]]].stop;
    }
    for (int op = start; op < stop; ++op) {
      base_during_[op] += step_.nbytes[buffer];
      if (is_tangent || op > start) base_before_[op] += step_.nbytes[buffer];
    }
    if (item_of_[buffer] < 0 && step_.producer[buffer] >= 0)
      rerun_bytes_[step_.producer[buffer]] += step_.nbytes[buffer];
  }
  int before = -1;
  for (int segment = 0; segment < static_cast<int>(step_.segments.size()); ++segment) {
    previous_.push_back(before);
    if (step_.segments[segment].start < step_.segments[segment].stop) before = segment;
  }
  find_needs();
  return true;
}

void Exact::find_needs() {
  const int num_ops = step_.num_ops();
  for (int op = 0; op < num_ops; ++op) {
    reads_.push_back(items(step_.reads[op]));
    makes_.push_back(0);
    writes_.push_back(0);
    for (const int buffer : step_.writes[op]) {
      if (item_of_[buffer] < 0) continue;
      (step_.producer[buffer] == op ? makes_ : writes_)[op] |= bit(item_of_[buffer]);
    }
  }
  seconds_left_.assign(num_ops + 1, 0);
  needed_.assign(num_ops + 1, 0);
  next_use_.assign(buffers_.size(), std::vector<int>(num_ops + 1, -1));
  Set used = 0;
  for (int op = num_ops - 1; op >= 0; --op) {
    seconds_left_[op] = seconds_left_[op + 1] + step_.seconds[op];
    used |= reads_[op] | writes_[op];
    Set needed = used, grown = 0;
    while (needed != grown) {
      grown = needed;
      each(grown, [&](int item) {
        const int producer = step_.producer[buffers_[item]];
        if (may_rerun_[producer]) needed |= reads_[producer];
      });
    }
    needed_[op] = needed;
    for (std::size_t item = 0; item < buffers_.size(); ++item) {
      const bool is_used = ((reads_[op] | writes_[op]) & bit(static_cast<int>(item))) != 0;
      next_use_[item][op] = is_used ? op : next_use_[item][op + 1];
    }
  }
}

std::optional<Found> Exact::run(int most_states) {
  if (!prepare()) return std::nullopt;
  add({}, -1, Act::kRun, -1);
  while (!queue_.empty()) {
    const int number = -queue_.top().second;
    queue_.pop();
    if (states_[number].next == step_.num_ops()) return trace(number);
    if (static_cast<int>(states_.size()) > most_states) return std::nullopt;
    expand(number);
  }
  return Found{};
}

void Exact::expand(int number) {
  move_items(number);
  run_next(number);
  const int segment = step_.segment_of[states_[number].next];
  for (int op = 0; op < states_[number].next; ++op) {
    if (may_rerun_[op] && step_.hands_on(step_.segment_of[op], segment)) run_again(number, op);
  }
}

void Exact::move_items(int number) {
  const State& now = states_[number];
  const Set needed = needed_[now.next], here = now.here & ~now.arriving & needed;
  const Set away = needed & now.copied & ~now.here & ~now.gone;
  const int rank = now.rank, last = now.last;
  if (rank == 0) each(here, [&](int item) { queue_out(number, item); });
  if (rank <= 1)
    each(here, [&](int item) {
      if (rank < 1 || item > last) leave(number, item);
    });
  each(away, [&](int item) { queue_in(number, item); });
}

// Whether the host copy of an item was made in, or passed to, a segment.
bool Exact::is_copy_for(const State& state, int item, int segment) const {
  return state.copied_in[item] == segment ||
         ((state.copied_at_border & bit(item)) != 0 && previous_[state.copied_in[item]] == segment);
}

// A copy out belongs to the segment of the last use before its release, which may be yet to come.
void Exact::queue_out(int number, int item) {
  State out = states_[number];
  const Set self = bit(item);
  const int segment = step_.segment_of[out.next], used_in = out.used_in[item];
  const Bytes nbytes = step_.nbytes[buffers_[item]];
  if (!limits_.may_swap || nbytes < limits_.min_swap_bytes || ((activations_ | out.remade) & self) == 0) return;
  const bool has_left = out.is_at_border && used_in == previous_[segment];
  if (used_in != segment && !has_left && !step_.hands_on(used_in, segment)) return;
  if ((out.copied & self) != 0 && (is_copy_for(out, item, segment) || (out.fresh & self) != 0)) return;
  out.copied |= self;
  out.fresh |= self;
  out.copied_at_border = out.is_at_border ? out.copied_at_border | self : out.copied_at_border & ~self;
  out.copied_at[item] = copy(out, false, nbytes);
  out.copied_in[item] = static_cast<std::int8_t>(segment);
  out.not_after[item] = out.outs;
  out.outs |= self;
  add(out, number, Act::kOut, item);
}

void Exact::leave(int number, int item) {
  State gone = states_[number];
  const Set self = bit(item);
  const int segment = step_.segment_of[gone.next], used_in = gone.used_in[item];
  const double clock = gone.clock;
  gone.rank = 1;
  gone.last = item;
  gone.here &= ~self;
  gone.gone |= self;
  const Bytes most = next_bytes(gone).second + bytes(needed_[gone.next] & gone.copied & ~gone.here & ~gone.gone);
  if (may_stay(gone, gone.gone, most, segment)) return;
  // At a segment's end, the next one may have begun, but no run in it. A backward directly after its forward can
  // receive the buffer with the copy, and release it.
  const bool may_release =
      used_in == segment || (used_in == previous_[segment] && (gone.is_at_border || step_.hands_on(used_in, segment)));
  if ((gone.copied & self) != 0 && may_release && is_copy_for(gone, item, used_in)) {
    gone.clock = std::max(clock, gone.copied_at[item]);
    add(gone, number, Act::kRelease, item);
    gone.clock = clock;
  }
  if ((gone.fresh & self) != 0) return;  // its copy would have been for nothing
  gone.copied &= ~self;
  if (next_use_[item][gone.next] < 0 || may_rerun_[step_.producer[buffers_[item]]]) add(gone, number, Act::kDrop, item);
}

void Exact::queue_in(int number, int item) {
  State back = states_[number];
  if (!step_.hands_on(back.used_in[item], step_.segment_of[back.next])) return;
  const Set self = bit(item);
  back.rank = 2;
  back.here |= self;
  if (next_bytes(back).first > limits_.budget_bytes) return;
  back.arriving |= self;
  back.last_in_start = std::max(back.clock, back.in_end);
  back.arrives_at[item] = copy(back, true, step_.nbytes[buffers_[item]]);
  back.not_after[item] |= back.ins;
  back.ins |= self;
  add(back, number, Act::kIn, item);
}

// Waits for prefetches; false if an item is non-resident, or copies of one position are not in order of need.
bool Exact::use(State& state, Set used, int segment) const {
  used &= present(state);
  if ((used & ~state.here) != 0) return false;
  const Set arrived = used & state.arriving;
  bool is_in_order = true;
  each(arrived, [&](int item) {
    is_in_order = is_in_order && (state.not_after[item] & ~arrived) == 0;
    state.clock = std::max(state.clock, state.arrives_at[item]);
    state.copied_in[item] = static_cast<std::int8_t>(segment);  // its host copy was passed to this segment with it
    state.not_after[item] = 0;
  });
  if (!is_in_order) return false;
  for (auto& items : state.not_after) items &= ~arrived;
  state.arriving &= ~arrived;
  state.fresh &= ~arrived;
  state.copied_at_border &= ~arrived;
  each(used, [&](int item) { state.used_in[item] = static_cast<std::int8_t>(segment); });
  return true;
}

void Exact::run_next(int number) {
  State after = states_[number];
  const int op = after.next, segment = step_.segment_of[op];
  if (!use(after, reads_[op] | writes_[op], segment)) return;
  const Set made = makes_[op] & ~later_copies_;
  if ((after.fresh & writes_[op]) != 0) return;
  after.here |= made;
  after.copied &= ~writes_[op];
  each(made, [&](int item) { after.used_in[item] = static_cast<std::int8_t>(segment); });
  ++after.next;
  compute(after, op);
  if (!end_run(after, segment, made, base_during_[op] + step_.scratch_bytes[op])) return;
  after.is_at_border = after.next < step_.num_ops() && step_.segment_of[after.next] != segment;
  if (after.is_at_border && after.arriving != 0) return;  // it was prefetched for this segment
  add(after, number, Act::kRun, op);
}

void Exact::run_again(int number, int op) {
  State after = states_[number];
  const int segment = step_.segment_of[after.next];
  const Set made = makes_[op], missing = made & ~after.here;
  if ((missing & needed_[after.next] & present(after)) == 0) return;
  if ((made & (after.arriving | after.fresh)) != 0 || (missing & after.copied) != 0) return;
  if (!use(after, reads_[op], segment)) return;
  after.here |= made;
  after.remade |= made & ~activations_;
  after.copied &= ~made;
  each(made, [&](int item) { after.used_in[item] = static_cast<std::int8_t>(segment); });
  compute(after, op);
  if (!end_run(after, segment, made, base_before_[after.next] + step_.scratch_bytes[op] + rerun_bytes_[op])) return;
  after.is_at_border = false;
  add(after, number, Act::kRerun, op);
}

// The least and the most bytes of any run that may be next, if nothing leaves or returns before.
std::pair<Bytes, Bytes> Exact::next_bytes(const State& state) const {
  const int next = state.next, segment = step_.segment_of[next];
  Bytes least = bytes(state.here | (makes_[next] & ~later_copies_)) + base_during_[next] + step_.scratch_bytes[next];
  Bytes most = least;
  for (int op = 0; op < next; ++op) {
    if (!may_rerun_[op] || !step_.hands_on(step_.segment_of[op], segment)) continue;
    const Bytes held = bytes(state.here | makes_[op]) + base_before_[next] + step_.scratch_bytes[op] + rerun_bytes_[op];
    least = std::min(least, held);
    most = std::max(most, held);
  }
  return {least, most};
}

// Whether one of `items`, which left since the last run, could stay beside `held` bytes and leave later.
bool Exact::may_stay(const State& state, Set items, Bytes held, int segment) const {
  bool may = false;
  each(items, [&](int item) {
    const bool is_last_chance =
        state.is_at_border && (state.copied & bit(item)) != 0 && state.used_in[item] == previous_[segment];
    may = may || (!is_last_chance && held + step_.nbytes[buffers_[item]] <= limits_.budget_bytes);
  });
  return may;
}

// False if the run does not fit, or if another state is no worse: one in which memory that was not needed is released
// later, or a copy out that serves no trip is not made, or a prefetch that has not begun is queued later: that only
// where the other lane and the host do not matter.
bool Exact::end_run(State& state, int segment, Set made, Bytes other_bytes) const {
  const Bytes held = bytes(state.here) + other_bytes;
  if (held > limits_.budget_bytes) return false;
  bool is_worse = link_.both_factor == 1 && link_.host_copy_seconds == 0 && (state.ins & state.arriving) != 0 &&
                  state.last_in_start >= state.clock;
  is_worse = is_worse || (state.gone & made) != 0 || may_stay(state, state.gone, held, segment);
  const Set needed = needed_[state.next];
  if (is_worse || (state.fresh & ~needed) != 0) return false;
  state.here &= needed;
  state.copied &= needed;
  state.rank = 0;
  state.last = -1;
  state.outs = state.ins = state.gone = 0;
  return true;
}

// A lower bound on the step's seconds from a state on: compute's work, with recomputes of what is neither resident nor
// copied; and the lane in, on which all that was copied out for a trip must return.
double Exact::least_seconds(const State& state) const {
  const Set needed = needed_[state.next] & present(state);
  double clock = state.clock, lane = std::max(state.clock, state.in_end), least = 0;
  std::vector<char> runs_again(step_.seconds.size(), 0);
  std::array<std::pair<int, int>, kMostExactItems> returns;  // use, item
  int num_returns = 0;
  each(needed & (~state.here | state.arriving | state.fresh), [&](int item) {
    const int use = next_use_[item][state.next], producer = step_.producer[buffers_[item]];
    if (producer >= state.next) return;
    if ((state.arriving & bit(item)) != 0) {
      if (use >= 0) least = std::max(least, state.arrives_at[item] + seconds_left_[use]);
    } else if ((state.here & bit(item)) != 0) {  // it may be used before it leaves
      returns[num_returns++] = {last_use_[item], item};
      const double back = link_.in.seconds(step_.nbytes[buffers_[item]]);
      least = std::max(least, std::max(state.clock, state.copied_at[item]) + back + seconds_left_[last_use_[item]]);
    } else if (use >= 0 && (state.copied & bit(item)) != 0) {
      returns[num_returns++] = {use, item};
    } else if (use >= 0 && !runs_again[producer]) {
      runs_again[producer] = 1;
      clock += step_.seconds[producer];
    }
  });
  std::sort(returns.begin(), returns.begin() + num_returns);
  for (int number = 0; number < num_returns; ++number) {
    lane += link_.in.seconds(step_.nbytes[buffers_[returns[number].second]]);
    least = std::max(least, lane + seconds_left_[returns[number].first]);
  }
  return std::max(least, clock + seconds_left_[state.next]);
}

void Exact::add(State state, int parent, Act act, int what) {
  state.parent = parent;
  state.act = act;
  state.what = what;
  if (is_dominated(state)) return;
  // Of equal ones the newest first, which is mostly the deepest; equal up to the order in which seconds were added.
  queue_.emplace(std::nearbyint(least_seconds(state) / (1e-10 * seconds_left_[0] + 1e-300)),
                 -static_cast<int>(states_.size()));
  states_.push_back(state);
}

bool Exact::is_dominated(const State& state) {
  auto& others = known_[key(state)];
  const auto dominates = [&](const State& a, const State& b) {
    const auto no_later = [&](double in_a, double in_b) { return in_a <= std::max(in_b, b.clock); };
    if (a.clock > b.clock || a.queued > b.queued) return false;
    if (!no_later(a.out_end, b.out_end) || !no_later(a.in_end, b.in_end)) return false;
    if (((a.outs & ~b.outs) | (a.ins & ~b.ins)) != 0) return false;
    for (std::size_t item = 0; item < buffers_.size(); ++item) {
      const Set self = bit(static_cast<int>(item));
      if ((a.copied & self) != 0 && !no_later(a.copied_at[item], b.copied_at[item])) return false;
      if ((a.arriving & self) != 0 && !no_later(a.arrives_at[item], b.arrives_at[item])) return false;
      if (((a.fresh | a.arriving) & self) != 0 && (a.not_after[item] & ~b.not_after[item]) != 0) return false;
    }
    return true;
  };
  for (const int other : others) {
    if (dominates(states_[other], state)) return true;
  }
  std::erase_if(others, [&](int other) { return dominates(state, states_[other]); });
  others.push_back(static_cast<int>(states_.size()));
  return false;
}

// What must be equal in two states for one to dominate the other.
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
  put(state.fresh);
  put(state.remade & needed_[state.next]);
  for (std::size_t item = 0; item < buffers_.size(); ++item) {
    const Set self = bit(static_cast<int>(item));
    put(((state.here | state.copied) & self) != 0 ? state.used_in[item] : std::int8_t{-1});
    put((state.copied & self) != 0 ? state.copied_in[item] : std::int8_t{-1});
    put((state.copied & state.copied_at_border & self) != 0);
  }
  return text;
}

Set Exact::items(const Rows::Row& buffers) const {
  Set found = 0;
  for (const int buffer : buffers) found |= item_of_[buffer] >= 0 ? bit(item_of_[buffer]) : 0;
  return found;
}

Bytes Exact::bytes(Set set) const {
  Bytes sum = 0;
  each(set, [&](int item) { sum += step_.nbytes[buffers_[item]]; });
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
  struct Trip {
    Swap swap;
    int queued;  // where its first copy is in the path: plans list trips of equal need in this order
  };
  std::vector<Trip> trips;
  const Trip none{{-1, -1, -1, -1, -1}, -1};
  std::vector<Trip> away(buffers_.size(), none);  // by item
  std::vector<int> copy_of(buffers_);             // by item: which copy of the buffer is the newest
  int run = 0, next = 0, made = step_.num_buffers();
  for (int place = 0; place < static_cast<int>(path.size()); ++place) {
    const auto [act, what] = std::pair{states_[path[place]].act, states_[path[place]].what};
    if (act == Act::kOut) away[what] = {{copy_of[what], run, -1, -1, -1}, place};
    if (act == Act::kRelease) {
      if (away[what].queued < 0) away[what].swap = {copy_of[what], -1, run, -1, -1};
      away[what].swap.release = run;
    }
    if (act == Act::kIn) {
      away[what].swap.in_start = run;
      if (away[what].queued < 0) away[what].queued = place;
    }
    if (act != Act::kRun && act != Act::kRerun) continue;
    each(reads_[what] | (act == Act::kRun ? writes_[what] : 0), [&](int item) {
      auto& trip = away[item];
      if (trip.swap.in_start < 0) return;
      trip.swap.first_use = run;
      trips.push_back(trip);
      trip = none;
    });
    if (act == Act::kRun) {
      next = what + 1;
    } else {
      found.reruns.push_back({what, next});
      for (const int buffer : step_.writes[what]) {
        if (item_of_[buffer] >= 0) copy_of[item_of_[buffer]] = made;
        ++made;
      }
    }
    ++run;
  }
  std::sort(trips.begin(), trips.end(), [](const Trip& a, const Trip& b) {
    return std::pair{a.swap.first_use, a.queued} < std::pair{b.swap.first_use, b.queued};
  });
  for (const auto& trip : trips) found.swaps.push_back(trip.swap);
  return found;
}

}  // namespace

std::optional<Found> find_exactly(const Step& step, const Link& link, const Limits& limits, int most_states) {
  return Exact(step, link, limits).run(most_states);
}

}  // namespace lmswap::planner
