// Where does each block lie that is held for a while? Lifetimes and sizes -> offsets, as low as they are found.
#pragma once

#include <cstdint>
#include <vector>

#include "step.h"

namespace lmswap::planner {

// Held over the positions [start, stop).
struct Block {
  int start, stop;
  Bytes nbytes;
};

struct Packing {
  std::vector<Bytes> offsets;
  Bytes capacity_bytes = 0;
};

// Blocks that are held at the same time get disjoint places.
//
// First fit in several orders, the best of which is then improved: a block that reaches the top, or one that it rests
// on, is placed earlier, as long as `most_visits` last (comparisons of two blocks; 1e8 take some 0.2 s). The problem is
// NP-hard; what is held at one time is a lower bound, at which the search ends.
Packing pack(const std::vector<Block>& blocks, std::int64_t most_visits);

}  // namespace lmswap::planner
