// Which calls fail, and with what? Those that were planned to, and all once the context is broken.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "codes.h"

namespace emulated_gpu {

class Faults {
 public:
  // What a call of `symbol` returns before it does anything.
  int take(const std::string& symbol) {
    const std::lock_guard lock(mutex_);
    if (broken_ != kSuccess) return broken_;
    const auto planned = planned_.find(symbol);
    if (planned == planned_.end() || --planned->second.num_calls > 0) return kSuccess;
    const int code = planned->second.code;
    planned_.erase(planned);
    return code;
  }

  // The nth call of `symbol` from now fails, once.
  void plan(const std::string& symbol, uint64_t nth, int code) {
    const std::lock_guard lock(mutex_);
    planned_[symbol] = {nth, code};
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
    uint64_t num_calls;
    int code;
  };
  std::mutex mutex_;
  std::map<std::string, Planned> planned_;
  int broken_ = kSuccess;
};

}  // namespace emulated_gpu
