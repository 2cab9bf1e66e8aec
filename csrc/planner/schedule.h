// The schedule of given actions by gap: the ops that run, recomputes included, and the idle intervals of their
// buffers.
#pragma once

#include <vector>

#include "step.h"

namespace lmswap::planner {

// The action for a gap between two uses of a buffer, or for the tail after its last use. A recompute may need the
// buffer inside its gap: it is then restored early, and either kept for its next use or evicted again.
enum class Action : std::uint8_t {
  kKeep,
  kSwap,  // over the step's end: the buffer is non-resident there
  kSwapAgain,
  kRecompute,
  kRecomputeAgain,
  // Over the step's end only, where the buffer is resident:
  kSwapNext,  // it is swapped before its first use
  kSwapBack,  // it is swapped after its last use
};
inline constexpr int kNumActions = 7, kNumAcyclicActions = 5;

inline bool is_swap(Action action) { return action == Action::kSwap || action == Action::kSwapAgain; }
inline bool is_recompute(Action action) { return action == Action::kRecompute || action == Action::kRecomputeAgain; }

// Runs between two uses of a version of a buffer, in which it is not used. Of a persistent buffer also those before its
// first use, whose `last_use` is -1, and those after its last one, whose `next_use` is the number of runs, or the last
// run if it is swapped back by then.
struct IdleInterval {
  int buffer, version;
  int gap;                 // whose action applies
  int last_use, next_use;  // runs
  int last_write;          // the run that wrote it last
  bool is_swapped;
  bool starts_offloaded = false;  // it is non-resident when the step starts
  bool ends_offloaded = false;    // and when it ends
};

struct Run {
  int op;
  int position;  // the op of the step that runs next or now: `op` itself, or the one that needs the recompute
  int gap;       // of a recompute: the gap that it ends early or in time; otherwise -1
  [[nodiscard]] bool is_recompute() const { return op != position; }
};

// Each recompute creates a new version of what its op writes. The step's own are 0 … n-1, by buffer; those of
// recomputes follow in order of execution.
struct Schedule {
  std::vector<Run> runs;
  std::vector<IdleInterval> idle_intervals;         // in order of `next_use`
  std::vector<Bytes> allocated_bytes, freed_bytes;  // by run, as it starts; `freed_bytes` has one entry more
  std::size_t num_versions = 0;
  std::vector<int> segment_start, segment_stop;  // by segment, in runs
  std::uint64_t key = 0;                         // of the recomputes and swaps, which determine the rest
};

class Scheduler {
 public:
  explicit Scheduler(const Step& step);

  // Returns false if the recomputes alone take more than `max_recompute_seconds`, or are more than `kMaxRunsPerOp`
  // times the step's ops: such plans are never the best.
  bool build(const std::vector<Action>& actions, double max_recompute_seconds, Schedule& schedule);

  static constexpr int kMaxRunsPerOp = 4;
  static constexpr int kMaxDepth = 4000;  // chain of recomputes; each costs a stack frame

 private:
  struct Version {
    int buffer, birth, last_use, last_write;
    bool is_swapped;  // after its last use so far
  };
  struct StepUse {
    int buffer, gap;  // the gap that follows
    bool is_write, is_first;
  };
  bool run(int op);
  bool recompute_op(int op, int position, int gap);
  bool ensure_inputs_resident(int op, int position);
  bool ensure_resident(int buffer, int position);
  void use(int buffer, int at, bool is_write);
  void create(int buffer, int at);
  void apply_action_after_recompute(int buffer);
  void add_end_intervals();
  void sum_lifetimes();

  const Step& step_;
  std::vector<StepUse> step_uses_;           // by op, in one array
  std::vector<std::size_t> first_step_use_;  // by op
  const std::vector<Action>* actions_ = nullptr;
  Schedule* out_ = nullptr;
  std::vector<Version> versions_;
  std::vector<int> newest_;              // by buffer: its version, or -1
  std::vector<int> persistent_;          // buffers
  std::vector<char> resident_at_start_;  // by buffer: resident before any op
  std::vector<char> is_resident_;        // by buffer: not dropped for a recompute, nor yet to be computed
  std::vector<int> gap_;                 // by buffer: its current gap
  std::vector<int> pin_counts_;          // by buffer: ops whose inputs are being made resident
  double recompute_seconds_left_ = 0;
  std::size_t max_runs_ = 0;
  int depth_ = 0;
};

}  // namespace lmswap::planner
