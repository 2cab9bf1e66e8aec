#include "lmswap/heap/heap.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <iterator>

#include "lmswap/clock.h"
#include "lmswap/error.h"
#include "lmswap/text.h"

namespace lmswap::heap {
namespace {

constexpr size_t kGrowBytes = size_t{64} << 20;  // addresses made accessible at a time: one mprotect per 64 MiB
constexpr size_t kStatsPageBytes = 4096;         // the unit of num_fresh_pages, whatever the kernel's page is
// Each moved huge page may become a mapping of its own: 16,384 of the 65,530 that a process may have.
constexpr size_t kMaxMovableBytes = size_t{32} << 30;
constexpr size_t kMaxChanges = 65'536;  // 1 MiB; a step of the 3D U-Net makes 1,500

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void* pointer_to(uintptr_t address) { return reinterpret_cast<void*>(address); }

void advise(uintptr_t start, uintptr_t end, int advice) {
  if (start < end) madvise(pointer_to(start), end - start, advice);
}

void insert_between(RangeSet& set, uintptr_t start, uintptr_t end) {
  if (start < end) set.insert({start, end - start});
}

// A failed mremap may have unmapped its target.
bool is_mapped(uintptr_t start, size_t nbytes) { return msync(pointer_to(start), nbytes, MS_ASYNC) == 0; }

// Maps lost addresses again; false if another thread has mapped something there.
bool remap(uintptr_t start, size_t nbytes) {
  constexpr int kThere = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  void* const found = mmap(pointer_to(start), nbytes, PROT_READ | PROT_WRITE, kThere, -1, 0);
  if (found == MAP_FAILED) return false;
  if (found != pointer_to(start)) {  // the kernel does not know MAP_FIXED_NOREPLACE, before Linux 4.17
    munmap(found, nbytes);
    return false;
  }
  advise(start, start + nbytes, MADV_HUGEPAGE);
  return true;
}

// Half of the addresses that the process may still use: threads, other allocators and compiled code need some, too.
size_t max_addresses() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return SIZE_MAX / 2;
  const size_t num_pages = std::strtoull(read_file("/proc/self/statm").c_str(), nullptr, 10);  // mapped by the process
  const size_t has_bytes = num_pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return limit.rlim_cur > has_bytes ? (limit.rlim_cur - has_bytes) / 2 : 0;
}

// Permits huge pages only where they are entirely inside `fresh`: a huge page becomes resident as a whole, including
// parts outside the block. A kernel without huge pages refuses, which does no harm.
void advise_huge_pages(Range fresh) {
  const uintptr_t first = std::min(round_up(fresh.start, kHugePageBytes), fresh.end());
  const uintptr_t last = std::max(fresh.end() / kHugePageBytes * kHugePageBytes, first);
  advise(fresh.start, first, MADV_NOHUGEPAGE);
  advise(first, last, MADV_HUGEPAGE);
  advise(last, fresh.end(), MADV_NOHUGEPAGE);
}

}  // namespace

void RangeSet::insert(Range range) {
  total_bytes_ += range.nbytes;
  const auto after = by_start_.lower_bound(range.start);
  const auto before = after == by_start_.begin() ? by_start_.end() : std::prev(after);
  if (after != by_start_.end() && after->first == range.end()) {
    range.nbytes += after->second;
    unlink(after);
  }
  if (before != by_start_.end() && before->first + before->second == range.start) {
    range = {before->first, before->second + range.nbytes};
    unlink(before);
  }
  link(range);
}

void RangeSet::remove(Range part) {
  const auto whole = std::prev(by_start_.upper_bound(part.start));
  const Range left{whole->first, part.start - whole->first};
  const Range right{part.end(), whole->first + whole->second - part.end()};
  unlink(whole);
  if (left.nbytes > 0) link(left);
  if (right.nbytes > 0) link(right);
  total_bytes_ -= part.nbytes;
}

Range RangeSet::best_fit(size_t nbytes) const {
  const auto found = by_size_.lower_bound({nbytes, 0});
  return found == by_size_.end() ? Range{} : Range{found->second, found->first};
}

size_t RangeSet::bytes_from(uintptr_t start) const {
  const auto found = by_start_.find(start);
  return found == by_start_.end() ? 0 : found->second;
}

void RangeSet::link(Range range) {
  by_start_.emplace(range.start, range.nbytes);
  by_size_.emplace(range.nbytes, range.start);
}

void RangeSet::unlink(std::map<uintptr_t, size_t>::const_iterator range) {
  by_size_.erase({range->second, range->first});
  by_start_.erase(range);
}

PageHeap::PageHeap(size_t reserve_bytes) : page_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
  for (size_t nbytes = round_up(std::min(reserve_bytes, max_addresses()), kGrowBytes); nbytes >= kGrowBytes;
       nbytes /= 2) {
    void* const base = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) continue;
    reserved_ = {reinterpret_cast<uintptr_t>(base), nbytes};
    accessible_end_ = reserved_.start;
    return;
  }
  throw OptionError("heap: the process may not reserve even " + format_bytes(kGrowBytes) + " of addresses (" +
                    errno_text(errno) + "); raise its limit, ulimit -v");
}

PageHeap::~PageHeap() {
  const uintptr_t lost = lost_start_ == 0 ? reserved_.end() : lost_start_.load();
  const uintptr_t behind = std::min(lost + kHugePageBytes, reserved_.end());
  munmap(pointer_to(reserved_.start), lost - reserved_.start);
  if (behind < reserved_.end()) munmap(pointer_to(behind), reserved_.end() - behind);
}

void* PageHeap::allocate(size_t nbytes) {
  if (nbytes == 0 || nbytes > reserved_.nbytes) return nullptr;
  nbytes = round_up(nbytes, page_bytes_);
  const std::lock_guard guard(mutex_);
  const auto [start, fresh, moved_bytes] = take_filled(nbytes);
  if (start == 0) return nullptr;
  live_.emplace(start, nbytes);
  stats_.live_bytes += nbytes;
  stats_.peak_live_bytes = std::max(stats_.peak_live_bytes, stats_.live_bytes);
  highest_live_bytes_ = std::max(highest_live_bytes_, stats_.live_bytes);
  record_change();
  stats_.num_fresh_pages += (fresh.nbytes - moved_bytes) / kStatsPageBytes;
  limit_retained();  // before the caller can touch fresh pages
  return pointer_to(start);
}

void PageHeap::free(void* block) {
  const std::lock_guard guard(mutex_);
  const auto found = live_.find(reinterpret_cast<uintptr_t>(block));
  if (found == live_.end()) {
    std::fprintf(stderr, "lmswap heap: free of %p, which is not the start of a live block (freed twice?)\n", block);
    std::abort();
  }
  stats_.live_bytes -= found->second;
  retained_.insert({found->first, found->second});
  live_.erase(found);
  record_change();
  limit_retained();
}

Stats PageHeap::stats() const {
  const std::lock_guard guard(mutex_);
  Stats stats = stats_;
  stats.retained_bytes = retained_.total_bytes();
  return stats;
}

size_t PageHeap::reusable_bytes() const {
  const std::lock_guard guard(mutex_);
  std::vector<unsigned char> pages(kGrowBytes / page_bytes_);
  const auto is_absent = [](unsigned char flags) { return (flags & 1) == 0; };
  size_t num_absent = 0;
  for (const auto& [size, start] : retained_.by_size()) {
    for (uintptr_t part = start; part < start + size; part += kGrowBytes) {
      const size_t nbytes = std::min<size_t>(kGrowBytes, start + size - part);
      if (mincore(pointer_to(part), nbytes, pages.data()) != 0) continue;
      const auto end = pages.begin() + static_cast<ptrdiff_t>(nbytes / page_bytes_);
      num_absent += static_cast<size_t>(std::count_if(pages.begin(), end, is_absent));
    }
  }
  return retained_.total_bytes() - num_absent * page_bytes_;
}

std::vector<Change> PageHeap::changes(double start_seconds, double stop_seconds) const {
  const std::lock_guard guard(mutex_);
  const auto is_before = [](const Change& change, double seconds) { return change.seconds < seconds; };
  const auto is_after = [](double seconds, const Change& change) { return seconds < change.seconds; };
  const auto first = std::lower_bound(changes_.begin(), changes_.end(), start_seconds, is_before);
  return {first, std::upper_bound(first, changes_.end(), stop_seconds, is_after)};
}

void PageHeap::reset_peak() {
  const std::lock_guard guard(mutex_);
  stats_.peak_live_bytes = stats_.live_bytes;
  stats_.peak_resident_bytes = stats_.live_bytes + retained_.total_bytes();
}

void PageHeap::set_limit(size_t resident_bytes) {
  const std::lock_guard guard(mutex_);
  limit_bytes_ = resident_bytes;
  limit_retained();
}

void PageHeap::trim() {
  const std::lock_guard guard(mutex_);
  highest_live_bytes_ = stats_.live_bytes;
  drop_retained(retained_.total_bytes());
}

void PageHeap::decommit(size_t nbytes) {
  const std::lock_guard guard(mutex_);
  for (auto range = retained_.by_size().rbegin(); range != retained_.by_size().rend() && nbytes > 0; ++range) {
    const auto [size, start] = *range;
    const bool has_huge = round_up(start, kHugePageBytes) + kHugePageBytes <= start + size;
    const size_t unit = has_huge ? kHugePageBytes : page_bytes_;  // a huge page that loses a part is lost
    const uintptr_t first = round_up(start, unit), end = (start + size) / unit * unit;
    const size_t part = std::min<size_t>(end - first, round_up(nbytes, unit));
    advise(end - part, end, MADV_DONTNEED);
    stats_.num_fresh_pages += part / kStatsPageBytes;
    nbytes -= std::min(part, nbytes);
  }
}

void PageHeap::record_change() {
  if (changes_.size() == kMaxChanges) changes_.pop_front();
  changes_.push_back({monotonic_seconds(), stats_.live_bytes});
}

// Takes addresses for a block, and moves retained pages to those that have none. Retries if a move has lost some of
// them.
PageHeap::Place PageHeap::take_filled(size_t nbytes) {
  for (;;) {
    Place place = take(nbytes);
    const bool had_lost = lost_start_ != 0;
    place.moved_bytes = move_retained(place.fresh);
    if (lost_start_ == 0 || had_lost) return place;
    const uintptr_t moved = lost_start_ - place.moved_bytes, behind = lost_start_ + kHugePageBytes;
    insert_between(retained_, place.start, place.fresh.start);
    insert_between(vacant_, place.fresh.start, moved);
    insert_between(retained_, moved, lost_start_);
    insert_between(vacant_, behind, place.fresh.end());
  }
}

PageHeap::Place PageHeap::take(size_t nbytes) {
  const Range fit{retained_.best_fit(nbytes).start, nbytes};
  if (fit.start != 0) {
    retained_.remove(fit);
    return {fit.start, {}, 0};
  }
  const Range base = find_extensible(nbytes);
  const uintptr_t start = base.nbytes > 0 ? base.start : find_vacant(nbytes);
  if (start == 0) return {};
  if (base.nbytes > 0) retained_.remove(base);
  const Range fresh{start + base.nbytes, nbytes - base.nbytes};
  vacant_.remove(fresh);
  broken_.erase(broken_.lower_bound(fresh.start), broken_.lower_bound(fresh.end()));
  break_huge_pages_at_ends(fresh);
  advise_huge_pages(fresh);
  return {start, fresh, 0};
}

// The largest retained range that is followed by enough vacant addresses for `nbytes`.
Range PageHeap::find_extensible(size_t nbytes) const {
  for (auto range = retained_.by_size().rbegin(); range != retained_.by_size().rend(); ++range) {
    const auto [retained_bytes, start] = *range;
    if (retained_bytes + vacant_.bytes_from(start + retained_bytes) >= nbytes) return {start, retained_bytes};
  }
  return {};
}

uintptr_t PageHeap::find_vacant(size_t nbytes) {
  if (vacant_.best_fit(nbytes).nbytes == 0) {
    const size_t growth = std::min(round_up(nbytes, kGrowBytes), reserved_.end() - accessible_end_);
    if (growth > 0 && mprotect(pointer_to(accessible_end_), growth, PROT_READ | PROT_WRITE) == 0) {
      vacant_.insert({accessible_end_, growth});
      accessible_end_ += growth;
    }
  }
  // At the end of the reservation, only retained ranges can still fragment the addresses.
  if (vacant_.best_fit(nbytes).nbytes == 0) drop_retained(retained_.total_bytes());
  return vacant_.best_fit(nbytes).start;
}

void PageHeap::limit_retained() {
  const size_t allowed = limit_bytes_ > 0 ? limit_bytes_ : highest_live_bytes_;
  const size_t resident = stats_.live_bytes + retained_.total_bytes();
  if (resident > allowed) drop_retained(std::min(round_up(resident - allowed, page_bytes_), retained_.total_bytes()));
  stats_.peak_resident_bytes = std::max(stats_.peak_resident_bytes, stats_.live_bytes + retained_.total_bytes());
}

// Moves retained huge pages, of the smallest ranges first, to the whole ones inside `fresh`; returns the number of
// bytes.
size_t PageHeap::move_retained(Range fresh) {
  if (accessible_end_ - reserved_.start > kMaxMovableBytes) return 0;
  const uintptr_t first = round_up(fresh.start, kHugePageBytes);
  const uintptr_t stop = fresh.end() / kHugePageBytes * kHugePageBytes;
  uintptr_t to = first;
  auto next = retained_.by_size().lower_bound({kHugePageBytes, 0});
  while (next != retained_.by_size().end() && to < stop) {
    const auto [size, start] = *next++;  // the rest of a range is smaller, and so sorted before `next`
    uintptr_t from = (start + size) / kHugePageBytes * kHugePageBytes;
    while (from >= start + kHugePageBytes && to < stop) {
      from -= kHugePageBytes;
      if (broken_.erase(from) > 0) {
        drop({from, kHugePageBytes});  // it is faulted in again, as a whole
      } else if (move_huge_page(from, to)) {
        to += kHugePageBytes;
      } else {
        return to - first;
      }
    }
  }
  return to - first;
}

// Moves the page table of a retained huge page, and leaves its old addresses vacant; false if the kernel refuses. Not
// tried again after that: the kernel is older than Linux 5.7 (EINVAL), or the process has nearly all mappings, or all
// addresses, that it may have (ENOMEM), and others need the remaining ones.
bool PageHeap::move_huge_page(uintptr_t from, uintptr_t to) {
  constexpr int kKeepSource = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
  if (!can_move_) return false;
  if (mremap(pointer_to(from), kHugePageBytes, kHugePageBytes, kKeepSource, pointer_to(to)) == MAP_FAILED) {
    can_move_ = false;
    if (!is_mapped(to, kHugePageBytes) && !remap(to, kHugePageBytes)) lost_start_ = to;
    return false;
  }
  retained_.remove({from, kHugePageBytes});
  vacant_.insert({from, kHugePageBytes});
  return true;
}

// Drops whole huge pages as far as possible: the rest of one that loses a part is small pages from then on.
void PageHeap::drop_retained(size_t nbytes) {
  nbytes -= drop_in_units(nbytes / kHugePageBytes * kHugePageBytes, kHugePageBytes);
  drop_in_units(nbytes, page_bytes_);
}

// Drops `nbytes`, a multiple of `unit`, of the whole units in retained ranges, or all of them; returns how much.
// Smallest ranges first: the largest are the most likely to be reused.
size_t PageHeap::drop_in_units(size_t nbytes, size_t unit) {
  size_t dropped = 0;
  for (auto next = retained_.by_size().begin(); next != retained_.by_size().end() && dropped < nbytes;) {
    const auto [size, start] = *next++;  // the rest of a range is smaller, and so sorted before `next`
    const uintptr_t end = (start + size) / unit * unit, first = round_up(start, unit);
    if (end <= first) continue;
    const size_t part = std::min<size_t>(end - first, nbytes - dropped);
    const Range tail{end - part, part};
    drop(tail);
    break_huge_pages_at_ends(tail);
    dropped += part;
  }
  return dropped;
}

// Returns a part of a retained range to the kernel.
void PageHeap::drop(Range part) {
  retained_.remove(part);
  advise(part.start, part.end(), MADV_NOHUGEPAGE);  // else the kernel may fill the rest of a huge page again
  advise(part.start, part.end(), MADV_DONTNEED);
  vacant_.insert(part);
}

// Records the huge pages that are split into small ones where `range` begins and ends.
void PageHeap::break_huge_pages_at_ends(Range range) {
  for (const uintptr_t end : {range.start, range.end()}) {
    if (end % kHugePageBytes != 0) broken_.insert(end / kHugePageBytes * kHugePageBytes);
  }
}

}  // namespace lmswap::heap
