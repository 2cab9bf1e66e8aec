// The planning problem: the ops of one step, their buffers, and the link to the tier.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace lmswap::planner {

using Bytes = std::int64_t;

// Rows of varying length in two arrays.
class Rows {
 public:
  Rows() = default;
  explicit Rows(const std::vector<std::vector<int>>& rows);

  struct Row {
    const int* first;
    const int* last;
    [[nodiscard]] const int* begin() const { return first; }
    [[nodiscard]] const int* end() const { return last; }
    [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(last - first); }
    int operator[](std::size_t index) const { return first[index]; }
  };
  Row operator[](int row) const { return {values_.data() + starts_[row], values_.data() + starts_[row + 1]}; }

 private:
  std::vector<std::size_t> starts_{0};
  std::vector<int> values_;
};

// Seconds of a copy by its size: points, linear between them and in proportion beyond the last.
struct Rate {
  std::vector<std::pair<Bytes, double>> points;
  [[nodiscard]] double seconds(Bytes nbytes) const;
};

struct Link {
  Rate out, in;
  double both_factor;                                 // the share of its rate that each direction keeps while both run
  double compute_factor;                              // the share of its speed that compute keeps while copies run
  double host_op_seconds = 0, host_copy_seconds = 0;  // the host's seconds to queue an op, and a copy
};

// Queues a copy behind the last of its lane and returns when it ends. Where `both_factor` f is below 1, the copy that
// was queued first keeps its rate and a simultaneous one in the other direction runs at 2f - 1 of its rate.
double queue_copy(const Link& link, bool is_in, Bytes nbytes, double now, double& out_end, double& in_end);

// End of an op that starts now and takes `seconds` without copies. Lanes run without a pause up to their ends.
inline double compute_end(const Link& link, double seconds, double now, double out_end, double in_end) {
  const double share = link.compute_factor;
  const double beside = std::max({0.0, out_end - now, in_end - now});
  return now + (seconds < beside * share ? seconds / share : seconds + beside * (1 - share));
}

enum class Lifetime : std::uint8_t {
  kActivation,  // from the op that makes it to its last use; can be swapped or recomputed
  kToEnd,       // from the op that makes it to the end of the step
  kTangent,     // as long as the segments that use it
  kToLastUse,   // from the op that makes it to its last use, always resident
  kSummed,      // as an activation, for every segment: can be swapped
  kPersistent,  // from step to step, for every segment: can be swapped, also over the step's end
  kFetched,     // as a persistent one; if it is swapped, then over the step's end, too, and each segment prefetches its
                // own
};

struct Segment {
  int start, stop;
  int forward;  // of a backward segment: the forward segment that passes it values; otherwise -1
};

// Buffers that live outside the step are left out of `reads`: they are always resident and not counted.
struct Step {
  std::vector<double> seconds;       // by op
  std::vector<Bytes> scratch_bytes;  // by op
  std::vector<char> repeatable;      // by op
  Rows reads, writes;                // by op
  std::vector<Bytes> nbytes;         // by buffer
  std::vector<Lifetime> lifetime;    // by buffer
  std::vector<Segment> segments;

  // Derived by `derive`.
  Rows uses;                    // by buffer: the ops that read or write it
  std::vector<int> producer;    // by buffer: the op that makes it, or -1
  std::vector<int> segment_of;  // by op
  std::vector<int> first_gap;   // by buffer: gap k follows its use k; the last one is the tail after its last use,
                                // of a persistent buffer to its first use in the next step
  std::vector<int> first_write, last_write;  // by buffer: ops; num_ops and -1 where nothing writes it

  void derive();
  [[nodiscard]] int num_ops() const { return static_cast<int>(seconds.size()); }
  [[nodiscard]] int num_buffers() const { return static_cast<int>(nbytes.size()); }
  [[nodiscard]] int num_gaps() const { return first_gap.back(); }
  // Whether the segment of `from` can pass a buffer to that of `to`.
  [[nodiscard]] bool can_pass(int from, int to) const { return from == to || segments[to].forward == from; }
  [[nodiscard]] bool is_persistent(int buffer) const { return lifetime[buffer] >= Lifetime::kPersistent; }
  [[nodiscard]] bool is_fetched(int buffer) const { return lifetime[buffer] == Lifetime::kFetched; }
  // Whether every segment can use it.
  [[nodiscard]] bool is_shared(int buffer) const { return lifetime[buffer] >= Lifetime::kSummed; }
  [[nodiscard]] bool is_swappable(int buffer) const {
    return nbytes[buffer] > 0 && (lifetime[buffer] == Lifetime::kActivation || is_shared(buffer));
  }
  // The gap of a persistent buffer over the step's end.
  [[nodiscard]] int end_gap(int buffer) const { return first_gap[buffer + 1] - 1; }
  // Whether a recompute at `position` of `op`, which reads the buffer, would read other bytes.
  [[nodiscard]] bool is_written_between(int buffer, int op, int position) const {
    return is_persistent(buffer) && last_write[buffer] > op && first_write[buffer] < position;
  }
};

}  // namespace lmswap::planner
