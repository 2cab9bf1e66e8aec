#include "step.h"

#include <algorithm>

namespace lmswap::planner {

Rows::Rows(const std::vector<std::vector<int>>& rows) {
  starts_.reserve(rows.size() + 1);
  for (const auto& row : rows) {
    values_.insert(values_.end(), row.begin(), row.end());
    starts_.push_back(values_.size());
  }
}

double Rate::seconds(Bytes nbytes) const {
  if (nbytes <= 0) return 0;
  const auto right = std::lower_bound(points.begin(), points.end(), nbytes,
                                      [](const auto& point, Bytes size) { return point.first < size; });
  if (right == points.begin()) return right->second;
  if (right == points.end()) {
    return points.back().second * static_cast<double>(nbytes) / static_cast<double>(points.back().first);
  }
  const auto left = right - 1;
  const auto share = static_cast<double>(nbytes - left->first) / static_cast<double>(right->first - left->first);
  return left->second + (right->second - left->second) * share;
}

double queue_copy(const Link& link, bool is_in, Bytes nbytes, double now, double& out_end, double& in_end) {
  double& own = is_in ? in_end : out_end;
  const double other = is_in ? out_end : in_end;
  const double seconds = (is_in ? link.in : link.out).seconds(nbytes);
  const double share = std::max(0.0, 2 * link.both_factor - 1);
  const double start = std::max(now, own);
  const double beside = std::max(0.0, other - start);
  own = seconds < beside * share ? start + seconds / share : start + seconds + beside * (1 - share);
  return own;
}

void Step::derive() {
  std::vector<std::vector<int>> found(nbytes.size());
  producer.assign(nbytes.size(), -1);
  segment_of.assign(seconds.size(), 0);
  first_write.assign(nbytes.size(), num_ops());
  last_write.assign(nbytes.size(), -1);
  for (int index = 0; index < static_cast<int>(segments.size()); ++index) {
    const auto& segment = segments[index];
    std::fill(segment_of.begin() + segment.start, segment_of.begin() + segment.stop, index);
  }
  const auto use = [&](int buffer, int op) {
    auto& ops = found[buffer];
    if (ops.empty() || ops.back() != op) ops.push_back(op);
  };
  for (int op = 0; op < num_ops(); ++op) {
    for (const int buffer : reads[op]) use(buffer, op);
    for (const int buffer : writes[op]) {
      const bool is_new = found[buffer].empty();
      first_write[buffer] = std::min(first_write[buffer], op);
      last_write[buffer] = op;
      if (is_new && lifetime[buffer] != Lifetime::kTangent && !is_persistent(buffer)) {
        producer[buffer] = op;
      }
      use(buffer, op);
    }
  }
  first_gap.assign(1, 0);
  for (const auto& ops : found) first_gap.push_back(first_gap.back() + static_cast<int>(ops.size()));
  uses = Rows(found);
}

}  // namespace lmswap::planner
