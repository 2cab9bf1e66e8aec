#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

namespace emulated_gpu {
namespace {

// Of addresses, and of their distance to the bytes; ThreadSanitizer leaves 1.5 TiB to all that is mapped.
constexpr uintptr_t kSpan = uintptr_t{1} << 37;
constexpr size_t kGranule = 2 << 20;  // what cudaMalloc rounds to
constexpr size_t kPage = 4096;

size_t round_up(size_t nbytes, size_t to) { return (nbytes + to - 1) / to * to; }

}  // namespace

size_t Blocks::remove(uintptr_t begin) {
  const auto block = blocks_.find(begin);
  if (block == blocks_.end()) return 0;
  const size_t nbytes = block->second;
  blocks_.erase(block);
  return nbytes;
}

void Blocks::keep(const std::function<bool(uintptr_t begin, size_t nbytes)>& is_kept) {
  std::erase_if(blocks_, [&](const auto& block) { return !is_kept(block.first, block.second); });
}

bool Blocks::meet(uintptr_t begin, size_t nbytes) const {
  const auto after = blocks_.lower_bound(begin + nbytes);
  if (after == blocks_.begin()) return false;
  const auto& [first, size] = *std::prev(after);
  return first + size > begin;
}

bool Blocks::contain(uintptr_t begin, size_t nbytes) const {
  const auto after = blocks_.upper_bound(begin);
  if (after == blocks_.begin()) return false;
  const auto& [first, size] = *std::prev(after);
  return begin + nbytes <= first + size;
}

size_t Blocks::nbytes() const {
  size_t sum = 0;
  for (const auto& [begin, nbytes] : blocks_) sum += nbytes;
  return sum;
}

DeviceMemory::DeviceMemory(size_t capacity_bytes, size_t context_bytes)
    : capacity_bytes_(capacity_bytes), used_bytes_(context_bytes) {
  void* range = mmap(nullptr, 2 * kSpan, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) abort();
  base_ = round_up(reinterpret_cast<uintptr_t>(range), kGranule);
  holes_[base_] = kSpan - kGranule;
}

// The requested bytes may be used, not those added by rounding.
void* DeviceMemory::allocate(size_t nbytes) {
  nbytes = std::max<size_t>(nbytes, 1);
  const size_t rounded = round_up(nbytes, kGranule);
  if (rounded > capacity_bytes_ || used_bytes_ > capacity_bytes_ - rounded) return nullptr;
  const auto hole = std::ranges::find_if(holes_, [&](const auto& hole) { return hole.second >= rounded; });
  if (hole == holes_.end()) return nullptr;
  const auto [begin, size] = *hole;
  void* address = reinterpret_cast<void*>(begin);
  if (mprotect(bytes_of(address), rounded, PROT_READ | PROT_WRITE) != 0) return nullptr;
  holes_.erase(hole);
  if (size > rounded) holes_[begin + rounded] = size - rounded;
  allocated_.add(begin, nbytes);
  used_bytes_ += rounded;
  return address;
}

size_t DeviceMemory::free(const void* address) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
  const size_t nbytes = allocated_.remove(begin), rounded = round_up(nbytes, kGranule);
  if (nbytes == 0) return 0;
  madvise(bytes_of(address), rounded, MADV_DONTNEED);
  mprotect(bytes_of(address), rounded, PROT_NONE);
  used_bytes_ -= rounded;
  const auto hole = holes_.emplace(begin, rounded).first;
  if (const auto after = std::next(hole); after != holes_.end() && after->first == begin + rounded) {
    hole->second += after->second;
    holes_.erase(after);
  }
  if (hole == holes_.begin()) return nbytes;
  if (const auto before = std::prev(hole); before->first + before->second == begin) {
    before->second += hole->second;
    holes_.erase(hole);
  }
  return nbytes;
}

bool DeviceMemory::owns(const void* address) const {
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  return at >= base_ && at < base_ + kSpan;
}

bool DeviceMemory::is_allocated(const void* begin, size_t nbytes) const {
  return allocated_.contain(reinterpret_cast<uintptr_t>(begin), nbytes);
}

void* DeviceMemory::bytes_of(const void* address) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) + kSpan);
}

void* PinnedMemory::allocate(size_t nbytes) {
  const size_t rounded = round_up(std::max<size_t>(nbytes, 1), kPage);
  void* begin = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) return nullptr;
  add(begin, rounded);
  return begin;
}

size_t PinnedMemory::free(void* begin) {
  const size_t nbytes = remove(begin);
  if (nbytes > 0) munmap(begin, nbytes);
  return nbytes;
}

void PinnedMemory::add(void* begin, size_t nbytes) { blocks_.add(reinterpret_cast<uintptr_t>(begin), nbytes); }

size_t PinnedMemory::remove(void* begin) { return blocks_.remove(reinterpret_cast<uintptr_t>(begin)); }

void PinnedMemory::forget_unmapped() {
  blocks_.keep([](uintptr_t begin, size_t nbytes) {
    const uintptr_t page = begin / kPage * kPage;
    return msync(reinterpret_cast<void*>(page), begin + nbytes - page, MS_ASYNC) == 0;
  });
}

bool PinnedMemory::meets(const void* begin, size_t nbytes) const {
  return blocks_.meet(reinterpret_cast<uintptr_t>(begin), nbytes);
}

bool PinnedMemory::contains(const void* begin, size_t nbytes) const {
  return blocks_.contain(reinterpret_cast<uintptr_t>(begin), nbytes);
}

}  // namespace emulated_gpu
