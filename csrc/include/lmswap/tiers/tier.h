/// @file
/// @brief A place for swapped bytes: slabs of storage, the blocks in them, and the lanes to and from them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lmswap/lanes/lane.h"
#include "lmswap/tiers/arena.h"
#include "lmswap/tiers/pending_transfers.h"

namespace lmswap {

inline constexpr uint64_t kGrowthBytes = 256 << 20;  ///< see `Tier::growth_bytes`

struct TierStats {
  uint64_t capacity_bytes = 0;  ///< reserved now
  uint64_t used_bytes = 0;      ///< allocated to blocks now
  uint64_t peak_used_bytes = 0;
  double reserve_seconds = 0;   ///< total time spent on allocating storage
  uint64_t resident_bytes = 0;  ///< memory in use now: `capacity_bytes`, or less if bytes are compressed
  uint64_t peak_resident_bytes = 0;
};

/// @brief Base of the tiers.
///
/// `reserve` creates one slab, in which blocks are at planned offsets. Where storage can be extended (pinned memory),
/// the slab grows in place, for a plan that needs more and for blocks that fit nowhere: pinning and unpinning memory
/// stall the device. Elsewhere a larger slab replaces it, which is freed with its last block, and blocks that fit
/// nowhere get further slabs. Capacity never exceeds the limit.
///
/// Blocks that the caller accesses in place have slabs of their own, which no other block shares.
///
/// Not thread-safe: callers hold the engine's lock. `reserve` and `take` release the lock while they allocate storage,
/// as pinning takes seconds, and hold it again when they return.
class Tier {
 public:
  virtual ~Tier() = default;
  Tier(const Tier&) = delete;
  Tier& operator=(const Tier&) = delete;

  /// @brief Provides one slab of at least `nbytes` for planned offsets.
  /// @param replace allocate a new slab even if the present one is large enough; that one is freed with its last block
  /// @param lock the engine's lock
  /// @throws TierError if the limit or the system forbids it; the tier has the same capacity as before, unless the
  /// error says that this cannot be reserved again
  void reserve(uint64_t nbytes, bool replace, std::unique_lock<std::mutex>& lock);

  /// @brief Allocates a block.
  /// @param offset planned offset in the slab; if it is occupied, the block is placed elsewhere
  /// @param lock the engine's lock
  /// @throws TierError if there is no room, and no storage can be added
  Block take(uint64_t offset, uint64_t nbytes, std::unique_lock<std::mutex>& lock);

  /// @return whether `take_together` is supported
  [[nodiscard]] virtual bool is_addressable() const { return false; }

  /// @brief Allocates blocks, page after page, in slabs of their own, whose storage has `data`. A slab has as many of
  /// them as `max_together_bytes` allows, at least one; it is as large as they are, and freed with the last of them.
  /// @param sizes of at least a byte each
  /// @param lock the engine's lock
  /// @throws TierError if the limit or the system forbids it; nothing is allocated then
  std::vector<Block> take_together(const std::vector<uint64_t>& sizes, std::unique_lock<std::mutex>& lock);

  using Storages = std::vector<std::shared_ptr<Storage>>;

  /// @brief Frees a block.
  /// @param users copies that may still access its bytes: its next holder waits for them
  /// @return storage that is no longer needed, to be destroyed without the lock
  Storages release(const Block& block, const std::vector<TransferPointer>& users);

  /// @return copies that may still access bytes of the block for its previous holders, except those that `stream` has
  /// waited for
  std::vector<TransferPointer> dependencies(const Block& block, StreamId stream);

  /// @brief Overwrites slabs allocated from now on with zeros before they are freed.
  void wipe_slabs() { wipes_ = true; }

  [[nodiscard]] virtual TierStats stats() const;
  virtual Lane& lane(Direction direction) = 0;

 protected:
  Tier(std::string name, uint64_t limit_bytes) : name_(std::move(name)), limit_bytes_(limit_bytes) {}

  /// @brief Allocates storage; called without the lock.
  /// @throws TierError if that fails
  virtual std::shared_ptr<Storage> allocate(uint64_t nbytes) = 0;

  /// @brief Allocates storage that has `data`; called without the lock, if `is_addressable`.
  /// @throws TierError if that fails
  virtual std::shared_ptr<Storage> allocate_addressable(uint64_t /*nbytes*/) { return nullptr; }

  /// @return the most bytes of several blocks in one `allocate_addressable`
  [[nodiscard]] virtual uint64_t max_together_bytes() const { return std::numeric_limits<uint64_t>::max(); }

  /// @return the least to allocate for blocks that fit nowhere; 0: exactly what each block needs
  [[nodiscard]] virtual uint64_t growth_bytes() const { return 0; }

  /// @return whether `extend` is supported
  [[nodiscard]] virtual bool is_extended() const { return false; }

  /// @brief Extends storage of `allocate` to `nbytes`; called without the lock.
  /// @throws TierError if that fails; the storage is unchanged
  virtual void extend(Storage&, uint64_t /*nbytes*/) {}
  [[nodiscard]] uint64_t limit_bytes() const { return limit_bytes_; }

 private:
  struct Slab {
    std::shared_ptr<Storage> storage;
    Arena arena;
    bool is_kept = false;         // the one for planned offsets; the others are freed with their last block
    PendingTransfers pending;     // of released blocks, in the order of their release; some may have finished
    bool is_addressable = false;  // of `take_together`
  };
  [[nodiscard]] std::vector<uint64_t> slab_sizes(const std::vector<uint64_t>& sizes) const;
  void check_limit(uint64_t more_bytes, uint64_t kept_bytes) const;
  Storages free_slabs();
  Slab& slab_of(const Block& block);
  std::shared_ptr<Storage> wiped(std::shared_ptr<Storage> storage) const;
  [[nodiscard]] bool has_kept() const { return !slabs_.empty() && slabs_.front().is_kept; }
  [[nodiscard]] bool has_shared() const { return !slabs_.empty() && !slabs_.front().is_addressable; }
  [[nodiscard]] uint64_t shared_bytes() const;
  std::optional<Block> find_room(uint64_t offset, uint64_t nbytes);
  void make_room(uint64_t nbytes, std::unique_lock<std::mutex>& lock);
  void add_slab(uint64_t nbytes, bool is_kept, std::unique_lock<std::mutex>& lock, Storages replaced = {});
  void restore_slab(uint64_t nbytes, const std::string& failure, std::unique_lock<std::mutex>& lock);
  void free_when_empty(Slab& slab, std::unique_lock<std::mutex>& lock);
  void extend_slab(uint64_t more_bytes, std::unique_lock<std::mutex>& lock);
  template <typename Make>
  void make_unlocked(std::unique_lock<std::mutex>& lock, Make make);
  Block hold(Slab& slab, uint64_t offset, uint64_t nbytes);

  const std::string name_;
  const uint64_t limit_bytes_;
  std::list<Slab> slabs_;                       // the kept one first, those of `take_together` last
  std::deque<TransferPointer> of_freed_slabs_;  // unfinished copies, which keep the storage of freed slabs allocated
  bool wipes_ = false;
  uint64_t used_bytes_ = 0, peak_used_bytes_ = 0;
  bool is_making_room_ = false;  // one thread at a time does
  std::condition_variable room_made_;
  double reserve_seconds_ = 0;
};

}  // namespace lmswap
