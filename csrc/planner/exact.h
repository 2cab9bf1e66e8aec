// The optimal plan of a step of a few ops: best-first search over all orders of copies, releases, runs and recomputes.
// A state is dominated by an equal one that is no later in any clock.
#pragma once

#include <optional>

#include "search.h"

namespace lmswap::planner {

inline constexpr int kMaxExactItems = 16;

// Empty if the step has too many buffers that can move, or `max_states` were not enough. `fits` is false if no plan
// fits.
std::optional<SearchResult> find_exactly(const Step& step, const Link& link, const Limits& limits, int max_states);

}  // namespace lmswap::planner
