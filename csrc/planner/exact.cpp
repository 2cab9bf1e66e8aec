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

using ItemSet = std::uint32_t;  // a bit for each item

enum class Event : std::uint8_t { kSwapOut, kRelease, kDrop, kPrefetch, kRun, kRecompute };

struct State {
  int next = 0;                     // the op of the step that has not run
  int rank = 0;                     // of the last event since the last run: swaps out, then releases, then prefetches
  int last = -1;                    // within one rank of releases, the last item: their order makes no difference
  bool is_at_segment_start = true;  // nothing has run in the segment of `next`
  ItemSet resident = 0, copied = 0, prefetching = 0;
  ItemSet recomputed = 0;                              // outputs and gradients: ops read the new version from then on
  ItemSet in_swap = 0;                                 // copied out for a swap that has not ended
  ItemSet copied_at_segment_start = 0;                 // between two segments: the host copy belongs to either
  ItemSet swap_outs = 0, prefetches = 0, evicted = 0;  // queued, and released or dropped, since the last run
  double clock = 0, out_end = 0, in_end = 0, queued = 0;
  double last_in_start = 0;  // of the last of `prefetches`
  std::array<double, kMaxExactItems> copied_at{}, prefetched_at{};
  std::array<std::int8_t, kMaxExactItems> last_segment{}, copied_segment{};  // of the last use, and of the host copy
  std::array<ItemSet, kMaxExactItems> not_after{};  // items whose swaps must not be needed later than this one's
  int parent = -1;
  Event event = Event::kRun;
  int subject = -1;  // item or op
};

// An item is a buffer that may be evicted: an activation; a gradient that lives to its last use, which recomputes may
// make later; or the versions of an output that recomputes make, where later ops read them.
class ExactSearch {
 public:
  ExactSearch(const Step& step, const Link& link, const Limits& limits) : step_(step), link_(link), limits_(limits) {}
  std::optional<SearchResult> run(int max_states);

 private:
  bool prepare();
  bool number_items();
  void find_needs();
  void expand(int number);
  void expand_moves(int number);
  void queue_swap_out(int number, int item);
  void evict(int number, int item);
  void queue_prefetch(int number, int item);
  void run_next(int number);
  void recompute(int number, int op);
  bool use(State& state, ItemSet items, int segment) const;
  [[nodiscard]] std::pair<Bytes, Bytes> next_bytes(const State& state) const;
  [[nodiscard]] bool could_evict_later(const State& state, ItemSet items, Bytes held, int segment) const;
  bool end_run(State& state, int segment, ItemSet made, Bytes other_bytes) const;
  void add(State state, int parent, Event event, int subject);
  [[nodiscard]] bool is_dominated(const State& state);
  [[nodiscard]] std::string key(const State& state) const;
  [[nodiscard]] Bytes bytes(ItemSet set) const;
  [[nodiscard]] ItemSet items(const Rows::Row& buffers) const;
  [[nodiscard]] ItemSet existing(const State& state) const { return ~recomputed_outputs_ | state.recomputed; }
  [[nodiscard]] double copy(State& state, bool is_in, Bytes nbytes) const;
  void compute(State& state, int op) const;
  [[nodiscard]] double min_seconds(const State& state) const;
  [[nodiscard]] bool has_copy_for(const State& state, int item, int segment) const;
  [[nodiscard]] SearchResult to_result(int number) const;

  const Step& step_;
  const Link& link_;
  const Limits& limits_;
  std::vector<int> buffers_;  // by item
  std::vector<int> item_of_;  // by buffer, or -1
  ItemSet activations_ = 0;
  ItemSet recomputed_outputs_ = 0;                // items of outputs: they exist once they are recomputed
  std::vector<Bytes> base_before_, base_during_;  // by op: bytes of other buffers
  std::vector<Bytes> recompute_bytes_;            // by op: of its results that are no items, once more
  std::vector<ItemSet> reads_, makes_, writes_;   // by op; `writes_` are those that others made
  std::vector<double> seconds_left_;              // by op
  std::vector<ItemSet> needed_;                   // by next op: items that it or later ones use, recomputes included
  std::vector<std::vector<int>> next_use_;        // by item and next op: the next op of the step that uses it, or -1
  std::vector<int> last_use_;        // by item: the last op of the step that uses it; its end, if recomputes do
  std::vector<char> may_recompute_;  // by op
  std::vector<int> previous_;        // by segment: the one before it that has ops, or -1
  std::vector<State> states_;
  std::unordered_map<std::string, std::vector<int>> by_key_;
  using Entry = std::pair<double, int>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;
};

template <typename Call>
void each(ItemSet set, Call call) {
  for (; set != 0; set &= set - 1) call(std::countr_zero(set));
}

constexpr ItemSet bit(int item) { return ItemSet{1} << item; }

bool ExactSearch::number_items() {
  const int num_ops = step_.num_ops();
  may_recompute_.assign(num_ops, 0);
  std::vector<char> is_read_by_recompute(step_.nbytes.size(), 0);  // a recompute may read it
  for (int op = 0; op < num_ops; ++op) {
    may_recompute_[op] = limits_.may_recompute && step_.repeatable[op] && step_.writes[op].size() > 0;
    for (const int buffer : step_.reads[op])
      is_read_by_recompute[buffer] = is_read_by_recompute[buffer] || may_recompute_[op];
  }
  item_of_.assign(step_.nbytes.size(), -1);
  for (int buffer = 0; buffer < step_.num_buffers(); ++buffer) {
    const int producer = step_.producer[buffer];
    if (step_.nbytes[buffer] == 0 || producer < 0 || step_.lifetime[buffer] == Lifetime::kTangent) continue;
    const bool is_used_later = step_.uses[buffer].size() > 1;
    if (step_.lifetime[buffer] == Lifetime::kToEnd && !(may_recompute_[producer] && is_used_later)) continue;
    if (step_.lifetime[buffer] == Lifetime::kToLastUse && !may_recompute_[producer] && !is_read_by_recompute[buffer])
      continue;
    if (buffers_.size() == kMaxExactItems) return false;
    const int item = item_of_[buffer] = static_cast<int>(buffers_.size());
    if (step_.lifetime[buffer] == Lifetime::kActivation) activations_ |= bit(item);
    if (step_.lifetime[buffer] == Lifetime::kToEnd) recomputed_outputs_ |= bit(item);
    buffers_.push_back(buffer);
    const auto uses = step_.uses[buffer];
    last_use_.push_back(is_read_by_recompute[buffer] ? num_ops : uses[uses.size() - 1]);
  }
  return true;
}

bool ExactSearch::prepare() {
  const int num_ops = step_.num_ops();
  if (step_.segments.size() > 127 || !number_items()) return false;
  Bytes all = 0;
  for (const int buffer : buffers_) all += step_.nbytes[buffer] + 4096;
  if (all > limits_.tier_bytes) return false;
  base_before_.assign(num_ops + 1, 0);
  base_during_.assign(num_ops + 1, 0);
  recompute_bytes_.assign(num_ops, 0);
  for (int buffer = 0; buffer < step_.num_buffers(); ++buffer) {
    const auto uses = step_.uses[buffer];
    const Lifetime lifetime = step_.lifetime[buffer];
    if (uses.size() == 0 || (item_of_[buffer] >= 0 && lifetime != Lifetime::kToEnd)) continue;
    int start = uses[0], stop = lifetime == Lifetime::kToEnd ? num_ops : uses[uses.size() - 1] + 1;
    const bool is_tangent = lifetime == Lifetime::kTangent;
    if (is_tangent) {
      start = step_.segments[step_.segment_of[uses[0]]].start;
      stop = step_.segments[step_.segment_of[uses[uses.size() - 1]]].stop;
    }
    for (int op = start; op < stop; ++op) {
      base_during_[op] += step_.nbytes[buffer];
      if (is_tangent || op > start) base_before_[op] += step_.nbytes[buffer];
    }
    if (item_of_[buffer] < 0 && step_.producer[buffer] >= 0)
      recompute_bytes_[step_.producer[buffer]] += step_.nbytes[buffer];
  }
  int before = -1;
  for (int segment = 0; segment < static_cast<int>(step_.segments.size()); ++segment) {
    previous_.push_back(before);
    if (step_.segments[segment].start < step_.segments[segment].stop) before = segment;
  }
  find_needs();
  return true;
}

void ExactSearch::find_needs() {
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
  ItemSet used = 0;
  for (int op = num_ops - 1; op >= 0; --op) {
    seconds_left_[op] = seconds_left_[op + 1] + step_.seconds[op];
    used |= reads_[op] | writes_[op];
    ItemSet needed = used, grown = 0;
    while (needed != grown) {
      grown = needed;
      each(grown, [&](int item) {
        const int producer = step_.producer[buffers_[item]];
        if (may_recompute_[producer]) needed |= reads_[producer];
      });
    }
    needed_[op] = needed;
    for (std::size_t item = 0; item < buffers_.size(); ++item) {
      const bool is_used = ((reads_[op] | writes_[op]) & bit(static_cast<int>(item))) != 0;
      next_use_[item][op] = is_used ? op : next_use_[item][op + 1];
    }
  }
}

std::optional<SearchResult> ExactSearch::run(int max_states) {
  if (!prepare()) return std::nullopt;
  add({}, -1, Event::kRun, -1);
  while (!queue_.empty()) {
    const int number = -queue_.top().second;
    queue_.pop();
    if (states_[number].next == step_.num_ops()) return to_result(number);
    if (static_cast<int>(states_.size()) > max_states) return std::nullopt;
    expand(number);
  }
  return SearchResult{};
}

void ExactSearch::expand(int number) {
  expand_moves(number);
  run_next(number);
  const int segment = step_.segment_of[states_[number].next];
  for (int op = 0; op < states_[number].next; ++op) {
    if (may_recompute_[op] && step_.can_pass(step_.segment_of[op], segment)) recompute(number, op);
  }
}

void ExactSearch::expand_moves(int number) {
  const State& now = states_[number];
  const ItemSet needed = needed_[now.next], resident = now.resident & ~now.prefetching & needed;
  const ItemSet offloaded = needed & now.copied & ~now.resident & ~now.evicted;
  const int rank = now.rank, last = now.last;
  if (rank == 0) each(resident, [&](int item) { queue_swap_out(number, item); });
  if (rank <= 1)
    each(resident, [&](int item) {
      if (rank < 1 || item > last) evict(number, item);
    });
  each(offloaded, [&](int item) { queue_prefetch(number, item); });
}

// Whether the host copy of an item was made in, or passed to, a segment.
bool ExactSearch::has_copy_for(const State& state, int item, int segment) const {
  return state.copied_segment[item] == segment ||
         ((state.copied_at_segment_start & bit(item)) != 0 && previous_[state.copied_segment[item]] == segment);
}

// A copy out belongs to the segment of the last use before its release, which may be yet to come.
void ExactSearch::queue_swap_out(int number, int item) {
  State after = states_[number];
  const ItemSet self = bit(item);
  const int segment = step_.segment_of[after.next], last_segment = after.last_segment[item];
  const Bytes nbytes = step_.nbytes[buffers_[item]];
  if (!limits_.may_swap || nbytes < limits_.min_swap_bytes || ((activations_ | after.recomputed) & self) == 0) return;
  const bool is_border_after_use = after.is_at_segment_start && last_segment == previous_[segment];
  if (last_segment != segment && !is_border_after_use && !step_.can_pass(last_segment, segment)) return;
  if ((after.copied & self) != 0 && (has_copy_for(after, item, segment) || (after.in_swap & self) != 0)) return;
  after.copied |= self;
  after.in_swap |= self;
  after.copied_at_segment_start =
      after.is_at_segment_start ? after.copied_at_segment_start | self : after.copied_at_segment_start & ~self;
  after.copied_at[item] = copy(after, false, nbytes);
  after.copied_segment[item] = static_cast<std::int8_t>(segment);
  after.not_after[item] = after.swap_outs;
  after.swap_outs |= self;
  add(after, number, Event::kSwapOut, item);
}

void ExactSearch::evict(int number, int item) {
  State after = states_[number];
  const ItemSet self = bit(item);
  const int segment = step_.segment_of[after.next], last_segment = after.last_segment[item];
  const double clock = after.clock;
  after.rank = 1;
  after.last = item;
  after.resident &= ~self;
  after.evicted |= self;
  const Bytes most =
      next_bytes(after).second + bytes(needed_[after.next] & after.copied & ~after.resident & ~after.evicted);
  if (could_evict_later(after, after.evicted, most, segment)) return;
  // At a segment's end, the next one may have begun, but no run in it. A backward directly after its forward can
  // receive the buffer with the copy, and release it.
  const bool may_release =
      last_segment == segment ||
      (last_segment == previous_[segment] && (after.is_at_segment_start || step_.can_pass(last_segment, segment)));
  if ((after.copied & self) != 0 && may_release && has_copy_for(after, item, last_segment)) {
    after.clock = std::max(clock, after.copied_at[item]);
    add(after, number, Event::kRelease, item);
    after.clock = clock;
  }
  if ((after.in_swap & self) != 0) return;  // its copy would have been for nothing
  after.copied &= ~self;
  if (next_use_[item][after.next] < 0 || may_recompute_[step_.producer[buffers_[item]]])
    add(after, number, Event::kDrop, item);
}

void ExactSearch::queue_prefetch(int number, int item) {
  State after = states_[number];
  if (!step_.can_pass(after.last_segment[item], step_.segment_of[after.next])) return;
  const ItemSet self = bit(item);
  after.rank = 2;
  after.resident |= self;
  if (next_bytes(after).first > limits_.budget_bytes) return;
  after.prefetching |= self;
  after.last_in_start = std::max(after.clock, after.in_end);
  after.prefetched_at[item] = copy(after, true, step_.nbytes[buffers_[item]]);
  after.not_after[item] |= after.prefetches;
  after.prefetches |= self;
  add(after, number, Event::kPrefetch, item);
}

// Waits for prefetches; false if an item is non-resident, or copies of one position are not in order of need.
bool ExactSearch::use(State& state, ItemSet used, int segment) const {
  used &= existing(state);
  if ((used & ~state.resident) != 0) return false;
  const ItemSet arrived = used & state.prefetching;
  bool is_in_order = true;
  each(arrived, [&](int item) {
    is_in_order = is_in_order && (state.not_after[item] & ~arrived) == 0;
    state.clock = std::max(state.clock, state.prefetched_at[item]);
    state.copied_segment[item] = static_cast<std::int8_t>(segment);  // its host copy was passed to this segment with it
    state.not_after[item] = 0;
  });
  if (!is_in_order) return false;
  for (auto& items : state.not_after) items &= ~arrived;
  state.prefetching &= ~arrived;
  state.in_swap &= ~arrived;
  state.copied_at_segment_start &= ~arrived;
  each(used, [&](int item) { state.last_segment[item] = static_cast<std::int8_t>(segment); });
  return true;
}

void ExactSearch::run_next(int number) {
  State after = states_[number];
  const int op = after.next, segment = step_.segment_of[op];
  if (!use(after, reads_[op] | writes_[op], segment)) return;
  const ItemSet made = makes_[op] & ~recomputed_outputs_;
  if ((after.in_swap & writes_[op]) != 0) return;
  after.resident |= made;
  after.copied &= ~writes_[op];
  each(made, [&](int item) { after.last_segment[item] = static_cast<std::int8_t>(segment); });
  ++after.next;
  compute(after, op);
  if (!end_run(after, segment, made, base_during_[op] + step_.scratch_bytes[op])) return;
  after.is_at_segment_start = after.next < step_.num_ops() && step_.segment_of[after.next] != segment;
  if (after.is_at_segment_start && after.prefetching != 0) return;  // it was prefetched for this segment
  add(after, number, Event::kRun, op);
}

void ExactSearch::recompute(int number, int op) {
  State after = states_[number];
  const int segment = step_.segment_of[after.next];
  const ItemSet made = makes_[op], missing = made & ~after.resident;
  if ((missing & needed_[after.next] & existing(after)) == 0) return;
  if ((made & (after.prefetching | after.in_swap)) != 0 || (missing & after.copied) != 0) return;
  if (!use(after, reads_[op], segment)) return;
  after.resident |= made;
  after.recomputed |= made & ~activations_;
  after.copied &= ~made;
  each(made, [&](int item) { after.last_segment[item] = static_cast<std::int8_t>(segment); });
  compute(after, op);
  if (!end_run(after, segment, made, base_before_[after.next] + step_.scratch_bytes[op] + recompute_bytes_[op])) return;
  after.is_at_segment_start = false;
  add(after, number, Event::kRecompute, op);
}

// The least and the most bytes of any run that may be next, if nothing is evicted or prefetched before.
std::pair<Bytes, Bytes> ExactSearch::next_bytes(const State& state) const {
  const int next = state.next, segment = step_.segment_of[next];
  Bytes least =
      bytes(state.resident | (makes_[next] & ~recomputed_outputs_)) + base_during_[next] + step_.scratch_bytes[next];
  Bytes most = least;
  for (int op = 0; op < next; ++op) {
    if (!may_recompute_[op] || !step_.can_pass(step_.segment_of[op], segment)) continue;
    const Bytes held =
        bytes(state.resident | makes_[op]) + base_before_[next] + step_.scratch_bytes[op] + recompute_bytes_[op];
    least = std::min(least, held);
    most = std::max(most, held);
  }
  return {least, most};
}

// Whether one of `items`, which were evicted since the last run, would fit in addition to `held` bytes and could be
// evicted later.
bool ExactSearch::could_evict_later(const State& state, ItemSet items, Bytes held, int segment) const {
  bool may = false;
  each(items, [&](int item) {
    const bool is_last_chance =
        state.is_at_segment_start && (state.copied & bit(item)) != 0 && state.last_segment[item] == previous_[segment];
    may = may || (!is_last_chance && held + step_.nbytes[buffers_[item]] <= limits_.budget_bytes);
  });
  return may;
}

// False if the run does not fit, or if another state is no worse: one in which memory that was not needed is released
// later, or a copy out that serves no swap is not made, or a prefetch that has not begun is queued later: that only
// where the other lane and the host do not matter.
bool ExactSearch::end_run(State& state, int segment, ItemSet made, Bytes other_bytes) const {
  const Bytes held = bytes(state.resident) + other_bytes;
  if (held > limits_.budget_bytes) return false;
  bool is_worse = link_.both_factor == 1 && link_.host_copy_seconds == 0 &&
                  (state.prefetches & state.prefetching) != 0 && state.last_in_start >= state.clock;
  is_worse = is_worse || (state.evicted & made) != 0 || could_evict_later(state, state.evicted, held, segment);
  const ItemSet needed = needed_[state.next];
  if (is_worse || (state.in_swap & ~needed) != 0) return false;
  state.resident &= needed;
  state.copied &= needed;
  state.rank = 0;
  state.last = -1;
  state.swap_outs = state.prefetches = state.evicted = 0;
  return true;
}

// A lower bound on the step's seconds from a state on: compute's work, with recomputes of what is neither resident nor
// copied; and the lane in, on which all that was copied out for a swap must be prefetched.
double ExactSearch::min_seconds(const State& state) const {
  const ItemSet needed = needed_[state.next] & existing(state);
  double clock = state.clock, lane = std::max(state.clock, state.in_end), least = 0;
  std::vector<char> is_recomputed(step_.seconds.size(), 0);
  std::array<std::pair<int, int>, kMaxExactItems> returns;  // use, item
  int num_returns = 0;
  each(needed & (~state.resident | state.prefetching | state.in_swap), [&](int item) {
    const int use = next_use_[item][state.next], producer = step_.producer[buffers_[item]];
    if (producer >= state.next) return;
    if ((state.prefetching & bit(item)) != 0) {
      if (use >= 0) least = std::max(least, state.prefetched_at[item] + seconds_left_[use]);
    } else if ((state.resident & bit(item)) != 0) {  // it may be used before its release
      returns[num_returns++] = {last_use_[item], item};
      const double back = link_.in.seconds(step_.nbytes[buffers_[item]]);
      least = std::max(least, std::max(state.clock, state.copied_at[item]) + back + seconds_left_[last_use_[item]]);
    } else if (use >= 0 && (state.copied & bit(item)) != 0) {
      returns[num_returns++] = {use, item};
    } else if (use >= 0 && !is_recomputed[producer]) {
      is_recomputed[producer] = 1;
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

void ExactSearch::add(State state, int parent, Event event, int subject) {
  state.parent = parent;
  state.event = event;
  state.subject = subject;
  if (is_dominated(state)) return;
  // Of equal ones the newest first, which is mostly the deepest; equal up to the order in which seconds were added.
  queue_.emplace(std::nearbyint(min_seconds(state) / (1e-10 * seconds_left_[0] + 1e-300)),
                 -static_cast<int>(states_.size()));
  states_.push_back(state);
}

bool ExactSearch::is_dominated(const State& state) {
  auto& others = by_key_[key(state)];
  const auto dominates = [&](const State& a, const State& b) {
    const auto no_later = [&](double in_a, double in_b) { return in_a <= std::max(in_b, b.clock); };
    if (a.clock > b.clock || a.queued > b.queued) return false;
    if (!no_later(a.out_end, b.out_end) || !no_later(a.in_end, b.in_end)) return false;
    if (((a.swap_outs & ~b.swap_outs) | (a.prefetches & ~b.prefetches)) != 0) return false;
    for (std::size_t item = 0; item < buffers_.size(); ++item) {
      const ItemSet self = bit(static_cast<int>(item));
      if ((a.copied & self) != 0 && !no_later(a.copied_at[item], b.copied_at[item])) return false;
      if ((a.prefetching & self) != 0 && !no_later(a.prefetched_at[item], b.prefetched_at[item])) return false;
      if (((a.in_swap | a.prefetching) & self) != 0 && (a.not_after[item] & ~b.not_after[item]) != 0) return false;
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
std::string ExactSearch::key(const State& state) const {
  std::string text;
  const auto put = [&](auto value) { text.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  put(state.next);
  put(state.rank);
  put(state.last);
  put(state.is_at_segment_start);
  put(state.resident);
  put(state.copied);
  put(state.prefetching);
  put(state.in_swap);
  put(state.recomputed & needed_[state.next]);
  for (std::size_t item = 0; item < buffers_.size(); ++item) {
    const ItemSet self = bit(static_cast<int>(item));
    put(((state.resident | state.copied) & self) != 0 ? state.last_segment[item] : std::int8_t{-1});
    put((state.copied & self) != 0 ? state.copied_segment[item] : std::int8_t{-1});
    put((state.copied & state.copied_at_segment_start & self) != 0);
  }
  return text;
}

ItemSet ExactSearch::items(const Rows::Row& buffers) const {
  ItemSet found = 0;
  for (const int buffer : buffers) found |= item_of_[buffer] >= 0 ? bit(item_of_[buffer]) : 0;
  return found;
}

Bytes ExactSearch::bytes(ItemSet set) const {
  Bytes sum = 0;
  each(set, [&](int item) { sum += step_.nbytes[buffers_[item]]; });
  return sum;
}

double ExactSearch::copy(State& state, bool is_in, Bytes nbytes) const {
  state.queued += link_.host_copy_seconds;
  state.clock = std::max(state.clock, state.queued);
  return queue_copy(link_, is_in, nbytes, state.clock, state.out_end, state.in_end);
}

void ExactSearch::compute(State& state, int op) const {
  state.queued += link_.host_op_seconds;
  const double start = std::max(state.clock, state.queued);
  state.clock = compute_end(link_, step_.seconds[op], start, state.out_end, state.in_end);
}

// Follows the parents back, and converts the events to a plan.
SearchResult ExactSearch::to_result(int number) const {
  std::vector<int> path;
  for (int at = number; at > 0; at = states_[at].parent) path.push_back(at);
  std::reverse(path.begin(), path.end());
  SearchResult found;
  found.fits = true;
  found.seconds = states_[number].clock;
  found.evaluations = static_cast<int>(states_.size());
  struct TracedSwap {
    Swap swap;
    int queued;  // where its first copy is in the path: plans list swaps of equal first use in this order
  };
  std::vector<TracedSwap> traced;
  const TracedSwap none{{-1, -1, -1, -1, -1}, -1};
  std::vector<TracedSwap> offloaded(buffers_.size(), none);  // by item
  std::vector<int> version_of(buffers_);                     // by item: its newest version
  int run = 0, next = 0, made = step_.num_buffers();
  for (int index = 0; index < static_cast<int>(path.size()); ++index) {
    const auto [event, subject] = std::pair{states_[path[index]].event, states_[path[index]].subject};
    if (event == Event::kSwapOut) offloaded[subject] = {{version_of[subject], run, -1, -1, -1}, index};
    if (event == Event::kRelease) {
      if (offloaded[subject].queued < 0) offloaded[subject].swap = {version_of[subject], -1, run, -1, -1};
      offloaded[subject].swap.release = run;
    }
    if (event == Event::kPrefetch) {
      offloaded[subject].swap.in_start = run;
      if (offloaded[subject].queued < 0) offloaded[subject].queued = index;
    }
    if (event != Event::kRun && event != Event::kRecompute) continue;
    each(reads_[subject] | (event == Event::kRun ? writes_[subject] : 0), [&](int item) {
      auto& current = offloaded[item];
      if (current.swap.in_start < 0) return;
      current.swap.first_use = run;
      traced.push_back(current);
      current = none;
    });
    if (event == Event::kRun) {
      next = subject + 1;
    } else {
      found.recomputes.push_back({subject, next});
      for (const int buffer : step_.writes[subject]) {
        if (item_of_[buffer] >= 0) version_of[item_of_[buffer]] = made;
        ++made;
      }
    }
    ++run;
  }
  std::sort(traced.begin(), traced.end(), [](const TracedSwap& a, const TracedSwap& b) {
    return std::pair{a.swap.first_use, a.queued} < std::pair{b.swap.first_use, b.queued};
  });
  for (const auto& finished : traced) found.swaps.push_back(finished.swap);
  return found;
}

}  // namespace

std::optional<SearchResult> find_exactly(const Step& step, const Link& link, const Limits& limits, int max_states) {
  return ExactSearch(step, link, limits).run(max_states);
}

}  // namespace lmswap::planner
