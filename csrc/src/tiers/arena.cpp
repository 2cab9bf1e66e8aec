#include "lmswap/tiers/arena.h"

#include <cassert>
#include <iterator>

namespace lmswap {

Arena::Arena(uint64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {
  assert(capacity_bytes % kPageBytes == 0);
  if (capacity_bytes > 0) free_[0] = capacity_bytes;
}

bool Arena::take(uint64_t offset, uint64_t nbytes) {
  nbytes = round_to_pages(nbytes);
  auto range = free_.upper_bound(offset);
  if (range == free_.begin()) return false;
  --range;
  const uint64_t end = range->first + range->second;
  if (offset % kPageBytes != 0 || nbytes == 0 || offset > end || nbytes > end - offset) return false;
  hold(range, offset, nbytes);
  return true;
}

std::optional<uint64_t> Arena::take_any(uint64_t nbytes) {
  nbytes = round_to_pages(nbytes);
  auto best = free_.end();
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    if (range->second >= nbytes && (best == free_.end() || range->second < best->second)) best = range;
  }
  if (nbytes == 0 || best == free_.end()) return std::nullopt;
  const uint64_t offset = best->first;
  hold(best, offset, nbytes);
  return offset;
}

void Arena::hold(std::map<uint64_t, uint64_t>::iterator free_range, uint64_t offset, uint64_t nbytes) {
  const uint64_t begin = free_range->first, end = begin + free_range->second;
  free_.erase(free_range);
  if (offset > begin) free_[begin] = offset - begin;
  if (offset + nbytes < end) free_[offset + nbytes] = end - (offset + nbytes);
  held_[offset] = nbytes;
  used_bytes_ += nbytes;
}

void Arena::grow(uint64_t capacity_bytes) {
  assert(capacity_bytes % kPageBytes == 0 && capacity_bytes > capacity_bytes_);
  const uint64_t more_bytes = capacity_bytes - capacity_bytes_;
  held_[capacity_bytes_] = more_bytes;  // until `release` below, which merges it with the free range before it
  used_bytes_ += more_bytes;
  release(capacity_bytes_);
  capacity_bytes_ = capacity_bytes;
}

uint64_t Arena::free_bytes_at_end() const {
  if (free_.empty()) return 0;
  const auto& [begin, nbytes] = *free_.rbegin();
  return begin + nbytes == capacity_bytes_ ? nbytes : 0;
}

void Arena::release(uint64_t offset) {
  const auto held = held_.find(offset);
  assert(held != held_.end());
  const uint64_t nbytes = held->second;
  used_bytes_ -= nbytes;
  held_.erase(held);
  auto range = free_.emplace(offset, nbytes).first;
  const auto next = std::next(range);
  if (next != free_.end() && offset + nbytes == next->first) {
    range->second += next->second;
    free_.erase(next);
  }
  if (range == free_.begin()) return;
  const auto previous = std::prev(range);
  if (previous->first + previous->second == offset) {
    previous->second += range->second;
    free_.erase(range);
  }
}

}  // namespace lmswap
