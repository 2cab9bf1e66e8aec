// Where swapped bytes go: slabs of storage, the blocks held in them, and the lanes to and from them.
//
// `reserve` makes one slab, and blocks lie in it where the plan says. A larger one made later replaces it; the old one
// is given back with its last block. A block that fits nowhere gets a slab of its own, within the limit.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "lmswap/arena.h"
#include "lmswap/lane.h"

namespace lmswap {

struct TierStats {
  uint64_t capacity_bytes = 0;  // reserved now
  uint64_t used_bytes = 0;      // held by blocks now
  uint64_t peak_used_bytes = 0;
};

class Tier {
 public:
  virtual ~Tier() = default;
  Tier(const Tier&) = delete;
  Tier& operator=(const Tier&) = delete;

  // Not safe from several threads at once: the engine holds its lock. Throw Error(kTier).
  void reserve(uint64_t nbytes);
  Block take(uint64_t offset, uint64_t nbytes);
  // `users` are copies that may still read or write the block's bytes: its next holder waits for them. Returns the
  // storage to let go of outside the lock.
  std::shared_ptr<Storage> release(const Block& block, const std::vector<TransferPointer>& users);
  // Copies that may still read or write bytes of the block on behalf of its previous holders.
  std::vector<TransferPointer> fences(const Block& block);

  // From now on, slabs that are given back are overwritten with zeros.
  void wipe_slabs(std::shared_ptr<Driver> driver) { wiper_ = std::move(driver); }

  TierStats stats() const;
  virtual Lane& lane(Direction direction) = 0;

 protected:
  Tier(std::string name, uint64_t limit_bytes) : name_(std::move(name)), limit_bytes_(limit_bytes) {}
  virtual std::shared_ptr<Storage> allocate(uint64_t nbytes) = 0;

 private:
  struct Slab {
    std::shared_ptr<Storage> storage;
    Arena arena;
    bool is_planned = false;  // the others are given back with their last block
  };
  void check_limit(uint64_t more_bytes, uint64_t kept_bytes) const;
  void drop_empty_slabs();
  void forget_finished_users();
  std::shared_ptr<Storage> make_storage(uint64_t nbytes);
  Block hold(Slab& slab, uint64_t offset, uint64_t nbytes);

  const std::string name_;
  const uint64_t limit_bytes_;
  std::list<Slab> slabs_;               // the planned one first
  std::vector<TransferPointer> users_;  // of released blocks, in the order of their release; some may have finished
  std::shared_ptr<Driver> wiper_;       // none: slabs are left as they are
  uint64_t used_bytes_ = 0, peak_used_bytes_ = 0;
};

}  // namespace lmswap
