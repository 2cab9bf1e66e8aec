// Where swapped bytes go: slabs of storage, the blocks held in them, and the lanes to and from them.
//
// `reserve` makes one slab, and blocks lie in it where the plan says. Where storage can be extended (pinned memory),
// the slab grows, for a plan that needs more and for blocks that fit nowhere, and keeps what it has: pinning and giving
// back stop the device. Elsewhere a larger slab replaces it, which is given back with its last block, and blocks that
// fit nowhere get further slabs. All within the limit.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lmswap/lanes/lane.h"
#include "lmswap/tiers/arena.h"
#include "lmswap/tiers/past_users.h"

namespace lmswap {

inline constexpr uint64_t kMoreAtOnceBytes = 256 << 20;

struct TierStats {
  uint64_t capacity_bytes = 0;  // reserved now
  uint64_t used_bytes = 0;      // held by blocks now
  uint64_t peak_used_bytes = 0;
  double reserve_seconds = 0;   // what it took to make the room that there was so far
  uint64_t resident_bytes = 0;  // what holds them now: as much as is reserved, or less where they are compressed
  uint64_t peak_resident_bytes = 0;
};

class Tier {
 public:
  virtual ~Tier() = default;
  Tier(const Tier&) = delete;
  Tier& operator=(const Tier&) = delete;

  // Not safe from several threads at once: the engine holds its lock. The first two give it back while they make room,
  // as pinning takes seconds, and have it again when they return. Throw Error(kTier).
  // `anew`: in a new slab also where the one that there is would do; its bytes are given back.
  void reserve(uint64_t nbytes, bool anew, std::unique_lock<std::mutex>& lock);
  Block take(uint64_t offset, uint64_t nbytes, std::unique_lock<std::mutex>& lock);
  // `users` are copies that may still read or write the block's bytes: its next holder waits for them. Returns what
  // storage to let go of outside the lock.
  using Storages = std::vector<std::shared_ptr<Storage>>;
  Storages release(const Block& block, const std::vector<TransferPointer>& users);
  // Copies that may still read or write bytes of the block on behalf of its previous holders, and that the stream is
  // not behind anyhow.
  std::vector<TransferPointer> fences(const Block& block, StreamId stream);

  // From now on, slabs that are given back are overwritten with zeros.
  void wipe_slabs() { wipes_ = true; }

  virtual TierStats stats() const;
  virtual Lane& lane(Direction direction) = 0;

 protected:
  Tier(std::string name, uint64_t limit_bytes) : name_(std::move(name)), limit_bytes_(limit_bytes) {}
  virtual std::shared_ptr<Storage> allocate(uint64_t nbytes) = 0;
  // Room for blocks that fit nowhere is made for so many bytes at once; 0: for each by itself.
  virtual uint64_t more_at_once_bytes() const { return 0; }
  virtual bool is_extended() const { return false; }
  virtual void extend(Storage&, uint64_t) {}  // one that `allocate` made, to so many bytes
  uint64_t limit_bytes() const { return limit_bytes_; }

 private:
  static constexpr size_t kFewUsers = 64;
  struct Slab {
    std::shared_ptr<Storage> storage;
    Arena arena;
    bool is_kept = false;  // the one that plans are for; the others are given back with their last block
  };
  void check_limit(uint64_t more_bytes, uint64_t kept_bytes) const;
  void drop_empty_slabs(Storages& dropped);
  Storages forget_finished_users();
  bool must_ask(const TransferPointer& user) const;
  std::shared_ptr<Storage> make_storage(uint64_t nbytes);
  bool has_kept() const { return !slabs_.empty() && slabs_.front().is_kept; }
  std::optional<Block> find_room(uint64_t offset, uint64_t nbytes);
  void make_room(uint64_t nbytes, std::unique_lock<std::mutex>& lock);
  void add_slab(uint64_t nbytes, bool is_kept, std::unique_lock<std::mutex>& lock, Storages replaced = {});
  void extend_slab(uint64_t more_bytes, std::unique_lock<std::mutex>& lock);
  template <typename Make>
  void make_unlocked(std::unique_lock<std::mutex>& lock, Make make);
  Block hold(Slab& slab, uint64_t offset, uint64_t nbytes);

  const std::string name_;
  const uint64_t limit_bytes_;
  std::list<Slab> slabs_;          // the one that is kept first
  PastUsers users_;                // of released blocks, in the order of their release; some may have finished
  size_t most_users_ = kFewUsers;  // when there are more, those that have finished are looked for
  bool asks_ = false;              // or when of one of them it matters
  bool wipes_ = false;
  uint64_t used_bytes_ = 0, peak_used_bytes_ = 0;
  bool is_making_room_ = false;  // by one thread at a time
  std::condition_variable room_made_;
  double reserve_seconds_ = 0;
};

}  // namespace lmswap
