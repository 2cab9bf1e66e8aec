// The seconds of a step under a plan.
#pragma once

#include "search.h"

namespace lmswap::planner {

// By the rules of lmswap/planner/simulate.py, without its timeline: a tenth of its time at 50,000 ops.
double predict(const Step& step, const Link& link, const SearchResult& plan);

}  // namespace lmswap::planner
