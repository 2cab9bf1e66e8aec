// Injected faults: the planned calls fail, and all once the context is broken.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "codes.h"

namespace emulated_gpu {

class Faults {
 public:
  // What a call of `symbol` returns before it does anything.
  int take(const std::string& symbol) {
    const std::lock_guard lock(mutex_);
    if (broken_ != kSuccess) return broken_;
    const auto due = std::ranges::find_if(planned_, [&](Planned& fault) {
      const bool is_meant = fault.symbol == symbol || (fault.symbol == "*" && !gives_back(symbol));
      return is_meant && --fault.num_calls == 0;
    });
    if (due == planned_.end()) return kSuccess;
    const int code = due->code;
    planned_.erase(due);
    return code;
  }

  // The nth call of `symbol` from now fails, once; "*": of all that do not give something back.
  void plan(const std::string& symbol, uint64_t nth, int code) {
    const std::lock_guard lock(mutex_);
    planned_.push_back({symbol, nth, code});
  }

  size_t num_planned() {
    const std::lock_guard lock(mutex_);
    return planned_.size();
  }

  // From now on every call fails: what a kernel or a copy did wrong shows in a later, unrelated call.
  void break_context(int code) {
    const std::lock_guard lock(mutex_);
    broken_ = code;
  }

  int broken() {
    const std::lock_guard lock(mutex_);
    return broken_;
  }

  // As in a new process: nothing is broken, nothing planned.
  void mend() {
    const std::lock_guard lock(mutex_);
    broken_ = kSuccess;
    planned_.clear();
  }

 private:
  struct Planned {
    std::string symbol;
    uint64_t num_calls;  // until it fails
    int code;
  };

  // A caller that does so makes the context current before, and no more after.
  static bool gives_back(const std::string& symbol) {
    constexpr const char* kParts[] = {"Destroy", "Free", "Unregister", "Release", "CtxPushCurrent", "CtxPopCurrent"};
    return std::ranges::any_of(kParts, [&](const char* part) { return symbol.find(part) != std::string::npos; });
  }

  std::mutex mutex_;
  std::vector<Planned> planned_;
  int broken_ = kSuccess;
};

}  // namespace emulated_gpu
