#include "order.h"

#include <algorithm>
#include <iterator>

namespace emulated_gpu {
namespace {

bool is_over(const Operation& operation, const VectorClock& clock) {
  return operation.number == 0 || clock.knows(operation.stream, operation.number);
}

std::string sentence(const Operation& operation, const Operation& other, const Use& use) {
  return std::string(operation.name) + " on stream " + std::to_string(operation.stream) +
         (use.is_write ? " writes " : " reads ") + std::to_string(use.nbytes) + " bytes that " + other.name +
         " on stream " + std::to_string(other.stream) + " uses, with no order between them";
}

}  // namespace

std::optional<std::string> Order::note(const Operation& operation, const VectorClock& clock, const Use& use) {
  if (use.nbytes == 0) return std::nullopt;
  const uintptr_t end = use.begin + use.nbytes;
  cut(use.begin);
  cut(end);
  std::optional<std::string> found;
  if (const Operation* other = find_unordered(clock, use)) found = sentence(operation, *other, use);
  if (use.is_write) {
    segments_.erase(segments_.lower_bound(use.begin), segments_.lower_bound(end));
    segments_[use.begin] = {end, operation, {}};
  } else {
    note_read(operation, use);
  }
  return found;
}

std::optional<std::string> Order::forget(uintptr_t begin, size_t nbytes, const VectorClock& clock) {
  cut(begin);
  cut(begin + nbytes);
  std::optional<std::string> found;
  if (const Operation* other = find_unordered(clock, {begin, nbytes, true})) {
    found = std::to_string(nbytes) + " bytes are given back before the host knows that " + other->name + " on stream " +
            std::to_string(other->stream) + " is done with them";
  }
  segments_.erase(segments_.lower_bound(begin), segments_.lower_bound(begin + nbytes));
  return found;
}

void Order::cut(uintptr_t at) {
  const auto after = segments_.upper_bound(at);
  if (after == segments_.begin()) return;
  const auto segment = std::prev(after);
  if (segment->first == at || segment->second.end <= at) return;
  Segment rest = segment->second;
  segment->second.end = at;
  segments_.emplace(at, std::move(rest));
}

const Operation* Order::find_unordered(const VectorClock& clock, const Use& use) const {
  const uintptr_t end = use.begin + use.nbytes;
  for (auto at = segments_.lower_bound(use.begin); at != segments_.end() && at->first < end; ++at) {
    const Segment& segment = at->second;
    if (!is_over(segment.write, clock)) return &segment.write;
    if (!use.is_write) continue;
    for (const Operation& read : segment.reads) {
      if (!is_over(read, clock)) return &read;
    }
  }
  return nullptr;
}

void Order::note_read(const Operation& operation, const Use& use) {
  const uintptr_t end = use.begin + use.nbytes;
  uintptr_t at = use.begin;
  for (auto segment = segments_.lower_bound(at); at < end; ++segment) {
    if (segment == segments_.end() || segment->first > at) {  // bytes that were not used yet
      const uintptr_t until = segment == segments_.end() ? end : std::min(end, segment->first);
      segment = segments_.emplace(at, Segment{until, {}, {}}).first;
    }
    auto& reads = segment->second.reads;
    const auto own = std::ranges::find(reads, operation.stream, &Operation::stream);
    if (own == reads.end()) {
      reads.push_back(operation);
    } else {
      *own = operation;
    }
    at = segment->second.end;
  }
}

}  // namespace emulated_gpu
