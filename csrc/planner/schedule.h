// What runs, when each gap of each buffer has its fate? Decisions -> the ops that run, second runs included, and the
// stretches in which what they make lies idle.
#pragma once

#include <vector>

#include "step.h"

namespace lmswap::planner {

// The fate of a gap between two uses of a buffer, or of the tail after its last use. A rerun may need the buffer in the
// midst of its gap: it is then back early, and either stays for its own next use or goes again.
enum class Fate : std::uint8_t { kKeep, kSwap, kSwapAgain, kRedo, kRedoAgain };
inline constexpr int kNumFates = 5;

inline bool swaps(Fate fate) { return fate == Fate::kSwap || fate == Fate::kSwapAgain; }
inline bool redoes(Fate fate) { return fate == Fate::kRedo || fate == Fate::kRedoAgain; }

// A time in which a buffer exists and is not used: after run `after`, before run `before`.
struct Stretch {
  int buffer;
  int copy;  // which one of the buffer
  int gap;   // of the buffer, as planned
  int after, before;
  int last_write;  // the run that wrote it last
  bool leaves;     // to the tier
};

struct Run {
  int op;
  int position;  // the op of the step that runs next or now: `op` itself, or the one that asked for the rerun
  int gap;       // of a rerun: the gap that it ends early or in time; otherwise -1
  [[nodiscard]] bool is_rerun() const { return op != position; }
};

// Buffers of the step are copies 0 … n-1; those that reruns make follow in order of execution.
struct Schedule {
  std::vector<Run> runs;
  std::vector<Stretch> stretches;  // in order of `before`
  std::vector<Bytes> born, dead;   // by run: bytes that begin and cease to exist there; `dead` has one entry more
  std::size_t num_copies = 0;
  std::vector<int> segment_start, segment_stop;  // by segment, in runs
  std::uint64_t key = 0;                         // of the reruns and of what leaves: the rest follows from them
};

class Scheduler {
 public:
  explicit Scheduler(const Step& step);

  // False if the reruns alone take more than `most_rerun_seconds`, or are more than `kMostRuns` times the step's ops:
  // no such plan is any good.
  bool build(const std::vector<Fate>& fates, double most_rerun_seconds, Schedule& schedule);

  static constexpr int kMostRuns = 4;
  static constexpr int kDeepest = 4000;  // chain of reruns; each costs a stack frame

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
  std::vector<char> at_start_;  // by buffer: is there before any op
  std::vector<char> is_there_;  // by buffer: the same, or made and not dropped
  std::vector<int> gap_;        // by buffer: the gap under way
  std::vector<int> pins_;       // by buffer: ops that wait for all of their inputs to be there
  double rerun_seconds_left_ = 0;
  std::size_t most_runs_ = 0;
  int depth_ = 0;
};

}  // namespace lmswap::planner
