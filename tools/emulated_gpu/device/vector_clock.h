// Vector clock: for every stream the number of its last operation that is known to have ended.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulated_gpu {

class VectorClock {
 public:
  void join(const VectorClock& other) {
    if (last_.size() < other.last_.size()) last_.resize(other.last_.size());
    for (size_t i = 0; i < other.last_.size(); ++i) last_[i] = std::max(last_[i], other.last_[i]);
  }

  // The number of the stream's next operation, known from now on.
  uint64_t advance(uint32_t stream) {
    if (last_.size() <= stream) last_.resize(stream + 1);
    return ++last_[stream];
  }

  bool knows(uint32_t stream, uint64_t operation) const { return stream < last_.size() && last_[stream] >= operation; }

 private:
  std::vector<uint64_t> last_;
};

}  // namespace emulated_gpu
