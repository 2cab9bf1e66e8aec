// Where does each block lie that is held for a while? Lifetimes and sizes -> offsets, as low as they are found.
#pragma once

#include <cstdint>
#include <vector>

#include "step.h"

namespace lmswap::planner {

constexpr int kNone = -1;

// Held over the positions [start, stop), in a higher place than the block of index `above`, and apart from those of its
// group.
struct Block {
  int start, stop;
  Bytes nbytes;
  int above = kNone;
  int group = kNone;
};

struct Packing {
  std::vector<Bytes> offsets;
  Bytes capacity_bytes = 0;
};

// Blocks that are held at the same time get disjoint places, each above that block which it is to be above (these
// relations have no circles). They touch each other, and the beginning, or are at least `apart_bytes` apart, as those
// of one group always are.
//
// First fit in several orders, the best of which is then improved: a block that reaches the top, or one that it rests
// on, is placed earlier, as long as `most_visits` last (comparisons of two blocks; 1e8 take some 0.1 s). The problem is
// NP-hard; what is held at one time is a lower bound, at which the search ends.
Packing pack(const std::vector<Block>& blocks, Bytes apart_bytes, std::int64_t most_visits);

}  // namespace lmswap::planner
