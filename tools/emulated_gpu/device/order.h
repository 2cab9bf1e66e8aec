// Detects two uses of the same bytes, one of them a write, without an order, from the calls alone, whatever threads
// did.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "vector_clock.h"

namespace emulated_gpu {

struct Use {
  uintptr_t begin = 0;
  size_t nbytes = 0;
  bool is_write = false;
};

struct Operation {
  const char* name = "";  // lives as long as the process
  uint32_t stream = 0;
  uint64_t number = 0;  // 0: none
};

class Order {
 public:
  // Notes a use, and says in a sentence which earlier one the operation's stream does not know to be over.
  std::optional<std::string> note(const Operation& operation, const VectorClock& clock, const Use& use);

  // Bytes that are given back have no uses; says in a sentence which one is not known to be over.
  std::optional<std::string> forget(uintptr_t begin, size_t nbytes, const VectorClock& clock);

 private:
  struct Segment {
    uintptr_t end = 0;
    Operation write;
    std::vector<Operation> reads;  // the last of every stream
  };

  void cut(uintptr_t at);
  const Operation* find_unordered(const VectorClock& clock, const Use& use) const;
  void note_read(const Operation& operation, const Use& use);

  std::map<uintptr_t, Segment> segments_;  // by their begin; cut at the bounds of uses
};

}  // namespace emulated_gpu
