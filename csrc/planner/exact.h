// Which plan is fastest, beyond doubt? Best-first search over all orders of copies, releases, runs and reruns, for
// steps of a few ops. Of two ways to the same state, one that is no later in any clock makes the other needless.
#pragma once

#include <optional>

#include "search.h"

namespace lmswap::planner {

inline constexpr int kMostExactBuffers = 16;

// Nothing if the step has too many buffers, or `most_states` were not enough. `fits` is false if no plan fits.
std::optional<Found> find_exactly(const Step& step, const Link& link, const Limits& limits, int most_states);

}  // namespace lmswap::planner
