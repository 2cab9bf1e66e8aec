// Record of misuse that real CUDA lets pass in silence, or answers with wrong bytes.
#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace emulated_gpu {

class Violations {
 public:
  void add(std::string sentence) {
    const std::lock_guard lock(mutex_);
    sentences_.push_back(std::move(sentence));
  }

  std::vector<std::string> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(sentences_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> sentences_;
};

}  // namespace emulated_gpu
