// Dynamic storage allocation: lifetimes and sizes of blocks -> offsets with a small total.
#pragma once

#include <cstdint>
#include <vector>

#include "step.h"

namespace lmswap::planner {

constexpr int kNone = -1;

// Held over the positions [start, stop), at a higher offset than the block of index `above`, not touching blocks of its
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

// Blocks that are held at the same time get disjoint ranges, each above its `above` block (these relations are
// acyclic). They touch each other, and offset 0, or are at least `separation_bytes` apart, as those of one group always
// are.
//
// First fit in several orders, the best of which is then improved: a block that reaches the top, or one below it, is
// placed earlier, for `max_visits` comparisons of two blocks (1e8 take some 0.1 s). The problem is NP-hard; the bytes
// held at one time are a lower bound, at which the search ends.
Packing pack(const std::vector<Block>& blocks, Bytes separation_bytes, std::int64_t max_visits);

}  // namespace lmswap::planner
