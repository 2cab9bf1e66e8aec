/// @file
/// @brief A page-granular heap for large blocks that keeps freed pages resident and reuses them.
///
/// Motivation: a training step on the CPU allocates and frees gigabytes of tensors. If each is mapped and unmapped,
/// half of the step is page faults; if a general-purpose heap keeps the pages, fragmentation makes the process grow by
/// 20-50 %. This heap keeps pages, but never more than were once needed at the same time.
///
///   address space   |  live A  | retained | vacant |  live B  | retained | vacant ...| not accessible yet |
///   resident memory |##########|##########|        |##########|##########|           |                    |
///
///   live      allocated blocks
///   retained  free, still resident; neighbours coalesce
///   vacant    free, not resident; costs only addresses, of which there are plenty
///
/// Placement: a block is cut from the best-fitting retained range; if none is large enough, it takes the largest
/// retained range that is followed by enough vacant addresses; else vacant addresses alone. Retained huge pages are
/// moved to its vacant addresses, and are then missing at their old ones. What is still retained beyond the limit is
/// returned to the kernel. Fragmentation therefore costs page faults, never memory, and few of those.
///
/// How many: replaying the allocations of training steps once they repeat, 0.5 % of the allocated pages are fresh for
/// the 3D U-Net at 96^3 (9 thousand of 2 million per step; plain torch faults 1.3 million), 4 % for a network of three
/// small convolutions (29 % without the second rule). Moving pages matters under a limit: of a step at 128^3 within 1.9
/// GiB, 1.0 to 1.4 GiB are fresh without it, 6 to 16 MiB with it. The kernel takes 2 to 19 us to move a huge page's
/// table, 700 to 940 us to fetch and zero another page; the step took 1.037 times one without a limit instead of 1.046.
///
/// Fresh pages are huge ones (2 MiB) where they lie entirely inside a block: a step of the 3D U-Net at 128^3 takes 4.5
/// s instead of 5.8 s on two cores. They are returned whole as far as possible. Returned in parts, they became fewer
/// from step to step: of 830 MiB at 96^3 from 700 to 590 MiB in 40 steps, with 15 thousand fresh pages a step. Returned
/// whole, 670 MiB stay huge, and 9 thousand pages are fresh. A huge page that has lost a part anyway, or was at the end
/// of a block, is not moved but dropped, so that it is faulted in whole again: of 435 MiB at 64^3 within 560 MiB, 398
/// MiB were huge after 5 steps and 406 after 40; moved like the others, 398 and 362.
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
  size_t live_bytes = 0;           ///< allocated now, rounded to pages
  size_t peak_live_bytes = 0;      ///< since reset_peak
  size_t retained_bytes = 0;       ///< free but kept for reuse
  size_t peak_resident_bytes = 0;  ///< live + retained, since reset_peak
  size_t num_fresh_pages = 0;      ///< allocated pages of 4 KiB that the kernel has to fault in
};

/// @brief The live bytes from `seconds` of CLOCK_MONOTONIC on.
struct Change {
  double seconds = 0;
  size_t live_bytes = 0;
};

/// @brief Addresses, half-open: [start, start + nbytes).
struct Range {
  uintptr_t start = 0;
  size_t nbytes = 0;
  [[nodiscard]] uintptr_t end() const { return start + nbytes; }
};

/// @brief Disjoint ranges of addresses; neighbours are merged. Not thread-safe.
class RangeSet {
 public:
  void insert(Range range);

  /// @brief Removes `part`, which must lie inside one range of the set.
  void remove(Range part);

  /// @return the smallest range of at least `nbytes`, the lowest of equals; an empty one if there is none
  [[nodiscard]] Range best_fit(size_t nbytes) const;

  /// @return the length of the range that begins at `start`; 0 if none does
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

/// @brief The heap. Thread-safe: one mutex, held for microseconds per block of megabytes.
class PageHeap {
 public:
  /// @brief Reserves addresses only, at most half of those that the process may still use (ulimit -v); halves the
  /// reservation until the kernel accepts it.
  /// @throws OptionError if not even 64 MiB of addresses can be reserved
  explicit PageHeap(size_t reserve_bytes);
  ~PageHeap();
  PageHeap(const PageHeap&) = delete;
  PageHeap& operator=(const PageHeap&) = delete;

  /// @return a page-aligned block with undefined contents; nullptr if there are too few addresses
  [[nodiscard]] void* allocate(size_t nbytes);

  /// @brief Frees a block. Aborts the process, as the C library does, if `block` is not the start of one.
  void free(void* block);

  /// @return whether the heap serves that address; lock-free
  [[nodiscard]] bool owns(const void* pointer) const noexcept {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    return address - reserved_.start < reserved_.nbytes && address - lost_start_ >= kHugePageBytes;
  }

  [[nodiscard]] Stats stats() const;

  /// @return the retained bytes that are resident: without decommitted pages, and those that were never written
  ///
  /// Queries the kernel; where it has no memory to answer, all retained bytes count.
  [[nodiscard]] size_t reusable_bytes() const;

  /// @return the changes in [start_seconds, stop_seconds], in order; only the last 65,536 changes are known
  [[nodiscard]] std::vector<Change> changes(double start_seconds, double stop_seconds) const;

  void reset_peak();

  /// @brief Limits live + retained bytes, by dropping retained pages.
  /// @param resident_bytes the limit; 0: the highest live bytes since `trim`
  void set_limit(size_t resident_bytes);

  /// @brief Returns all retained pages to the kernel, and resets the highest live bytes.
  void trim();

  /// @brief Returns pages of `nbytes`, or of all retained ranges, to the kernel; they are faulted in again on use.
  ///
  /// The ranges stay retained, so that later blocks are placed as before. Dropped instead, 1 MiB of 47 made a step
  /// fetch 33.
  void decommit(size_t nbytes);

  /// @brief For a fork, which copies the heap: `lock` before it, `unlock` in parent and child after it.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  void record_change();
  struct Place {
    uintptr_t start = 0;     // of the block
    Range fresh;             // addresses in it that had no pages
    size_t moved_bytes = 0;  // how many of those have moved pages since
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
  std::set<uintptr_t> broken_;  // huge pages that are, or may be, split into small ones
  bool can_move_ = true;
  std::atomic<uintptr_t> lost_start_ = 0;  // a huge page's addresses that the kernel has unmapped; 0: none
  size_t limit_bytes_ = 0;
  size_t highest_live_bytes_ = 0;
  Stats stats_;
  std::deque<Change> changes_;
};

}  // namespace lmswap::heap
