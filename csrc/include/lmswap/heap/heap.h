// A page-granular heap for large blocks that keeps freed pages resident and hands them out again.
//
// The problem: a training step on the CPU allocates and frees gigabytes of tensors. When each is mapped and unmapped,
// half of the step is page faults; when a general-purpose heap keeps the pages, fragmentation makes the process grow by
// 20-50 %. This heap does neither: it keeps pages, but never more than were once needed at the same time.
//
//   address space   |  live A  | retained | vacant |  live B  | retained | vacant ...| not accessible yet |
//   resident memory |##########|##########|        |##########|##########|           |                    |
//
//   live      allocated blocks
//   retained  free, still resident; neighbours coalesce
//   vacant    free, not resident; costs nothing but addresses, of which there are plenty
//
// A block is cut from the best-fitting retained range; if none is large enough, it takes the largest retained range
// that goes on into enough vacant addresses; else vacant addresses alone. Under those move retained huge pages, which
// are then missing elsewhere. What is still retained beyond the limit is given back to the kernel. So fragmentation
// costs page faults, never memory, and few of those.
//
// How many: replaying the allocations of training steps once they repeat, of the pages handed out 0.5 % are fresh for
// the 3D U-Net at 96^3 (9 thousand of 2 million per step; plain torch faults 1.3 million), 4 % for a network of three
// small convolutions (29 % without the second rule). Under a limit more would be, were they not moved: of a step at
// 128^3 within 1.9 GiB 1.0 to 1.4 GiB, and 6 to 16 MiB where they are. The kernel takes 2 to 19 us to pass a huge
// page's table on, 700 to 940 us to fetch and zero another one; the step took 1.037 times one without a limit instead
// of 1.046.
//
// Fresh pages are huge ones (2 MiB) where they lie wholly inside a block: a step of the 3D U-Net at 128^3 takes 4.5 s
// instead of 5.8 s on two cores. They are given back whole as far as possible. Given back in parts, they became fewer
// from step to step: of 830 MiB at 96^3 from 700 to 590 MiB in 40 steps, with 15 thousand fresh pages a step. Given
// back whole, 670 MiB stay huge, and 9 thousand pages are fresh. What has lost a part all the same, or lay at the end
// of a block, does not move but is dropped, so that it comes back whole: of 435 MiB at 64^3 within 560 MiB, 398 MiB
// were huge after 5 steps and 406 after 40; moved like the others, 398 and 362.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lmswap::heap {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

struct Stats {
  size_t live_bytes = 0;           // allocated now, rounded to pages
  size_t peak_live_bytes = 0;      // since reset_peak
  size_t retained_bytes = 0;       // free but kept for reuse
  size_t peak_resident_bytes = 0;  // live + retained, since reset_peak
  size_t num_fresh_pages = 0;      // 4 KiB pages handed out that the kernel has to fault in
};

/// From `seconds` of the monotonic clock on, so much was allocated.
struct Change {
  double seconds = 0;
  size_t live_bytes = 0;
};

/// Half-open [start, start + nbytes).
struct Range {
  uintptr_t start = 0;
  size_t nbytes = 0;
  [[nodiscard]] uintptr_t end() const { return start + nbytes; }
};

/// Disjoint ranges of addresses; neighbours are joined.
class RangeSet {
 public:
  void insert(Range range);
  /// Takes `part`, which must lie inside one range of the set.
  void remove(Range part);
  /// The smallest range of at least `nbytes`, the lowest of equals; an empty one when there is none.
  [[nodiscard]] Range best_fit(size_t nbytes) const;
  /// The length of the range that begins at `start`; 0 when none does.
  [[nodiscard]] size_t bytes_from(uintptr_t start) const;
  [[nodiscard]] const std::set<std::pair<size_t, uintptr_t>>& by_size() const { return by_size_; }
  [[nodiscard]] size_t total_bytes() const { return total_bytes_; }

 private:
  void link(Range range);
  void unlink(std::map<uintptr_t, size_t>::const_iterator range);

  std::map<uintptr_t, size_t> by_start_;
  std::set<std::pair<size_t, uintptr_t>> by_size_;
  size_t total_bytes_ = 0;
};

/// The heap proper. Thread-safe: one mutex, held for microseconds per block of megabytes.
class PageHeap {
 public:
  /// Reserves addresses only, at most half of those that the process may still have (ulimit -v), and halves the
  /// reservation until the kernel allows it.
  /// Throws Error(kOption) when not even 64 MiB of addresses are to be had.
  explicit PageHeap(size_t reserve_bytes);
  ~PageHeap();
  PageHeap(const PageHeap&) = delete;
  PageHeap& operator=(const PageHeap&) = delete;

  /// A page-aligned block, contents undefined; nullptr when the addresses do not suffice.
  [[nodiscard]] void* allocate(size_t nbytes);
  /// Frees a block of this heap; aborts, like the C library, on a pointer that is not the start of one.
  void free(void* block);
  [[nodiscard]] bool owns(const void* pointer) const noexcept {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    return address - reserved_.start < reserved_.nbytes && address - lost_start_ >= kHugePageBytes;
  }

  [[nodiscard]] Stats stats() const;
  /// What of the retained bytes is resident: lent pages are not until they are used, nor is what no block wrote to.
  /// Asks the kernel; where that has no memory to answer, all counts.
  [[nodiscard]] size_t reusable_bytes() const;
  /// What happened in [start_seconds, stop_seconds], in order; only the last 65,536 changes are known.
  [[nodiscard]] std::vector<Change> changes(double start_seconds, double stop_seconds) const;
  void reset_peak();
  /// Retained pages are dropped whenever live + retained would pass this; 0 stands for the highest live since `trim`.
  void set_limit(size_t resident_bytes);
  /// Gives all retained pages back to the kernel, and forgets the highest live.
  void trim();
  /// Gives pages of `nbytes`, or of all that is retained, to the kernel for a while: they stay retained, so that blocks
  /// will lie where they did, and come anew when they are used. Dropped instead, 1 MiB of 47 made a step fetch 33.
  void lend(size_t nbytes);

  /// For a fork, which copies the heap as it stands: `lock` before it, `unlock` on both sides after it.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  void note_change();
  /// Where a block lies, which of its addresses had no pages, and how many of those have been given some since.
  struct Place {
    uintptr_t start = 0;
    Range fresh;
    size_t moved_bytes = 0;
  };
  Place take_filled(size_t nbytes);
  Place take(size_t nbytes);
  [[nodiscard]] Range find_extensible(size_t nbytes) const;
  uintptr_t find_vacant(size_t nbytes);
  void limit_retained();
  size_t move_retained(Range fresh);
  bool move_huge_page(uintptr_t from, uintptr_t to);
  void drop_retained(size_t nbytes);
  size_t drop_in_units(size_t nbytes, size_t unit);
  void drop(Range part);
  void break_huge_pages_at_ends(Range range);

  mutable std::mutex mutex_;
  const size_t page_bytes_;
  Range reserved_;
  uintptr_t accessible_end_ = 0;  // from here on the reservation is PROT_NONE
  std::unordered_map<uintptr_t, size_t> live_;
  RangeSet retained_;
  RangeSet vacant_;
  std::set<uintptr_t> broken_;  // addresses of huge pages that are small ones, or may be
  bool can_move_ = true;
  std::atomic<uintptr_t> lost_start_ = 0;  // of a huge page's addresses that the kernel has taken away: others' by now
  size_t limit_bytes_ = 0;
  size_t highest_live_bytes_ = 0;
  Stats stats_;
  std::deque<Change> changes_;
};

}  // namespace lmswap::heap
