// The memory curve over runs, as a segment tree of maxima.
#pragma once

#include <algorithm>
#include <vector>

#include "step.h"

namespace lmswap::planner {

// Adds to ranges and finds maxima in O(log n).
class Curve {
 public:
  void assign(const std::vector<Bytes>& values) {
    size_ = 1;
    while (size_ < values.size()) size_ *= 2;
    max_.assign(2 * size_, 0);
    added_.assign(2 * size_, 0);
    std::copy(values.begin(), values.end(), max_.begin() + static_cast<std::ptrdiff_t>(size_));
    for (std::size_t node = size_ - 1; node > 0; --node) max_[node] = std::max(max_[2 * node], max_[2 * node + 1]);
  }

  // Adds to the runs [start, stop).
  void add(int start, int stop, Bytes nbytes) {
    if (start < stop) add(1, 0, static_cast<int>(size_), start, stop, nbytes);
  }

  // The last run of [start, stop) whose value is over `limit`, or -1.
  [[nodiscard]] int last_over(int start, int stop, Bytes limit) const {
    return start < stop ? last_over(1, 0, static_cast<int>(size_), start, stop, limit) : -1;
  }

 private:
  void add(std::size_t node, int low, int high, int start, int stop, Bytes nbytes) {
    if (start <= low && high <= stop) {
      max_[node] += nbytes;
      added_[node] += nbytes;
      return;
    }
    const int middle = (low + high) / 2;
    if (start < middle) add(2 * node, low, middle, start, stop, nbytes);
    if (stop > middle) add(2 * node + 1, middle, high, start, stop, nbytes);
    max_[node] = std::max(max_[2 * node], max_[2 * node + 1]) + added_[node];
  }

  [[nodiscard]] int last_over(std::size_t node, int low, int high, int start, int stop, Bytes limit) const {
    if (max_[node] <= limit || high <= start || stop <= low) return -1;
    if (high - low == 1) return low;
    const int middle = (low + high) / 2;
    const int found = last_over(2 * node + 1, middle, high, start, stop, limit - added_[node]);
    return found >= 0 ? found : last_over(2 * node, low, middle, start, stop, limit - added_[node]);
  }

  std::size_t size_ = 0;
  std::vector<Bytes> max_;    // of the runs below a node, with everything added at or below it
  std::vector<Bytes> added_;  // to all runs below a node at once
};

}  // namespace lmswap::planner
