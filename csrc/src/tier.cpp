#include "lmswap/tier.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "lmswap/copy_mover.h"
#include "lmswap/direct_mover.h"
#include "lmswap/error.h"
#include "lmswap/staged_mover.h"

namespace lmswap {

void Tier::reserve(uint64_t nbytes) {
  nbytes = round_to_pages(nbytes);
  const bool has_planned = !slabs_.empty() && slabs_.front().is_planned;
  if (nbytes == 0 || (has_planned && slabs_.front().storage->nbytes() >= nbytes)) return;
  const bool is_replaced = has_planned && slabs_.front().arena.used_bytes() == 0;
  check_limit(nbytes, stats().capacity_bytes - (is_replaced ? slabs_.front().storage->nbytes() : 0));
  if (has_planned) slabs_.front().is_planned = false;
  // Given back first, not after: the old and the new slab may not fit beside each other.
  drop_empty_slabs();
  slabs_.push_front({allocate(nbytes), Arena(nbytes), true});
}

void Tier::drop_empty_slabs() {
  std::erase_if(slabs_, [](const Slab& slab) { return !slab.is_planned && slab.arena.used_bytes() == 0; });
}

void Tier::check_limit(uint64_t more_bytes, uint64_t kept_bytes) const {
  if (more_bytes <= limit_bytes_ && kept_bytes <= limit_bytes_ - more_bytes) return;
  throw Error(ErrorKind::kTier, name_ + " tier: " + format_bytes(more_bytes) + " more would exceed its limit of " +
                                    format_bytes(limit_bytes_) + "; it has " + format_bytes(kept_bytes) +
                                    ", of which " + format_bytes(used_bytes_) +
                                    " are held. Raise the limit or swap less");
}

Block Tier::take(uint64_t offset, uint64_t nbytes) {
  if (!slabs_.empty() && slabs_.front().arena.take(offset, nbytes)) return hold(slabs_.front(), offset, nbytes);
  for (Slab& slab : slabs_) {
    if (const auto place = slab.arena.take_any(nbytes)) return hold(slab, *place, nbytes);
  }
  const uint64_t slab_bytes = round_to_pages(nbytes);
  check_limit(slab_bytes, stats().capacity_bytes);
  slabs_.push_back({allocate(slab_bytes), Arena(slab_bytes), false});
  return hold(slabs_.back(), *slabs_.back().arena.take_any(nbytes), nbytes);
}

Block Tier::hold(Slab& slab, uint64_t offset, uint64_t nbytes) {
  used_bytes_ += round_to_pages(nbytes);
  peak_used_bytes_ = std::max(peak_used_bytes_, used_bytes_);
  return Block{slab.storage, offset, nbytes};
}

std::shared_ptr<Storage> Tier::release(const Block& block, const std::vector<TransferPointer>& users) {
  used_bytes_ -= round_to_pages(block.nbytes);
  for (const TransferPointer& user : users) {
    if (user->is_finished()) {
      user->forget_storage();
    } else {
      users_.push_back(user);
    }
  }
  const auto slab =
      std::find_if(slabs_.begin(), slabs_.end(), [&](const Slab& other) { return other.storage == block.storage; });
  slab->arena.release(block.offset);
  std::shared_ptr<Storage> storage = slab->storage;
  drop_empty_slabs();
  return storage;
}

std::vector<TransferPointer> Tier::fences(const Block& block) {
  std::erase_if(users_, [](const TransferPointer& user) { return user->is_finished(); });
  std::vector<TransferPointer> fences;
  std::copy_if(users_.begin(), users_.end(), std::back_inserter(fences), [&](const TransferPointer& user) {
    const Block& other = user->block;
    return other.storage == block.storage && other.offset < block.offset + block.nbytes &&
           block.offset < other.offset + other.nbytes;
  });
  return fences;
}

TierStats Tier::stats() const {
  TierStats stats{0, used_bytes_, peak_used_bytes_};
  for (const Slab& slab : slabs_) stats.capacity_bytes += slab.storage->nbytes();
  return stats;
}

namespace {

bool is_paced(const LaneOptions& options) {
  return options.out_bytes_per_second > 0 || options.in_bytes_per_second > 0;
}

}  // namespace

// When one lane has a thread both do: a transfer may wait for one of the other lane, and the caller must not.
HostTier::HostTier(std::shared_ptr<Driver> driver, uint64_t limit_bytes, const LaneOptions& options)
    : Tier("host", limit_bytes),
      driver_(std::move(driver)),
      out_(std::make_unique<CopyMover>(driver_, options.out_bytes_per_second), is_paced(options)),
      in_(std::make_unique<CopyMover>(driver_, options.in_bytes_per_second), is_paced(options)) {}

Lane& HostTier::lane(Direction direction) { return direction == Direction::kOut ? out_ : in_; }

std::shared_ptr<Storage> HostTier::allocate(uint64_t nbytes) {
  try {
    return std::make_shared<PinnedMemory>(driver_, nbytes);
  } catch (const Error& error) {
    throw Error(ErrorKind::kTier, "host tier: " + format_bytes(nbytes) +
                                      " of pinned memory cannot be had: " + error.what() +
                                      ". Free host memory, raise the limit on locked memory, or swap less");
  }
}

namespace {

std::unique_ptr<Mover> make_disk_mover(const std::shared_ptr<Driver>& driver, IoPool& pool, int num_requests,
                                       double bytes_per_second) {
  if (driver->device_is_host()) return std::make_unique<DirectMover>(pool, num_requests, bytes_per_second);
  return std::make_unique<StagedMover>(driver, pool, num_requests, bytes_per_second);
}

}  // namespace

// Twice as many requests as threads: the next one is there when a thread ends its own.
DiskTier::DiskTier(const std::shared_ptr<Driver>& driver, std::shared_ptr<Faults> faults, std::string directory,
                   uint64_t limit_bytes, int io_threads, const LaneOptions& options)
    : Tier("disk", limit_bytes),
      faults_(std::move(faults)),
      directory_(std::move(directory)),
      pool_(io_threads),
      out_(make_disk_mover(driver, pool_, 2 * io_threads, options.out_bytes_per_second), true),
      in_(make_disk_mover(driver, pool_, 2 * io_threads, options.in_bytes_per_second), true) {}

Lane& DiskTier::lane(Direction direction) { return direction == Direction::kOut ? out_ : in_; }

std::shared_ptr<Storage> DiskTier::allocate(uint64_t nbytes) {
  return std::make_shared<DirectFile>(directory_, nbytes, faults_);
}

}  // namespace lmswap
