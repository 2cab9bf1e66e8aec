// The schedule of given actions by gap: the ops that run, recomputes included, and the stretches in which their buffers
// are idle.
#pragma once

#include <vector>

#include "step.h"

namespace lmswap::planner {

// The action for a gap between two uses of a buffer, or for the tail after its last use. A recompute may need the
// buffer inside its gap: it is then restored early, and either kept for its next use or evicted again.
enum class Fate : std::uint8_t { kKeep, kSwap, kSwapAgain, kRedo, kRedoAgain };
inline constexpr int kNumFates = 5;

inline bool swaps(Fate fate) { return fate == Fate::kSwap || fate == Fate::kSwapAgain; }
inline bool redoes(Fate fate) { return fate == Fate::kRedo || fate == Fate::kRedoAgain; }

// A time in which a buffer exists and is not used: after run `after`, before run `before`.
struct Stretch {
  int buffer;
  int copy;  // which copy of the buffer
  int gap;   // of the buffer, as planned
  int after, before;
  int last_write;  // the run that wrote it last
  bool leaves;     // to the tier
};

struct Run {
  int op;
  int position;  // the op of the step that runs next or now: `op` itself, or the one that needs the recompute
  int gap;       // of a recompute: the gap that it ends early or in time; otherwise -1
  [[nodiscard]] bool is_rerun() const { return op != position; }
};

// Buffers of the step are copies 0 … n-1; those of recomputes follow in order of execution.
struct Schedule {
  std::vector<Run> runs;
  std::vector<Stretch> stretches;  // in order of `before`
  std::vector<Bytes> born, dead;   // by run: bytes that begin and cease to exist there; `dead` has one entry more
  std::size_t num_copies = 0;
  std::vector<int> segment_start, segment_stop;  // by segment, in runs
  std::uint64_t key = 0;                         // of the recomputes and swaps, which determine the rest
};

class Scheduler {
 public:
  explicit Scheduler(const Step& step);

  // False if the recomputes alone take more than `most_rerun_seconds`, or are more than `kMostRuns` times the step's
  // ops: such plans are never the best.
  bool build(const std::vector<Fate>& fates, double most_rerun_seconds, Schedule& schedule);

  static constexpr int kMostRuns = 4;
  static constexpr int kDeepest = 4000;  // chain of recomputes; each costs a stack frame

 private:
  struct Copy {
    int buffer, birth, last_use, last_write;
    bool leaves;  // after its last use so far
  };
  struct OwnUse {
    int buffer, gap;  // the gap that follows
    bool is_write, is_first;
  };
  bool run(int op);
  bool run_again(int op, int position, int gap);
  bool make_ready(int op, int position);
  bool ensure(int buffer, int position);
  void use(int buffer, int at, bool is_write);
  void make(int buffer, int at);
  void after_use_by_rerun(int buffer);
  void finish();

  const Step& step_;
  std::vector<OwnUse> own_uses_;            // by op, in one array
  std::vector<std::size_t> first_own_use_;  // by op
  const std::vector<Fate>* fates_ = nullptr;
  Schedule* out_ = nullptr;
  std::vector<Copy> copies_;
  std::vector<int> newest_;     // by buffer: its copy, or -1
  std::vector<char> at_start_;  // by buffer: is resident before any op
  std::vector<char> is_there_;  // by buffer: the same, or computed and not dropped
  std::vector<int> gap_;        // by buffer: its current gap
  std::vector<int> pins_;       // by buffer: ops that wait for all of their inputs to be resident
  double rerun_seconds_left_ = 0;
  std::size_t most_runs_ = 0;
  int depth_ = 0;
};

}  // namespace lmswap::planner
