#include "lmswap/tiers/tier.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>
#include <utility>

#include "lmswap/clock.h"
#include "lmswap/error.h"

namespace lmswap {

void Tier::reserve(uint64_t nbytes, bool replace, std::unique_lock<std::mutex>& lock) {
  nbytes = round_to_pages(nbytes);
  room_made_.wait(lock, [&] { return !is_making_room_; });
  const uint64_t kept_bytes = has_kept() ? slabs_.front().arena.capacity_bytes() : 0;
  if (nbytes <= kept_bytes && !replace) return;
  if (has_kept() && is_extended() && !replace) return extend_slab(nbytes - kept_bytes, lock);
  const bool is_replaced = has_kept() && slabs_.front().arena.used_bytes() == 0;
  check_limit(nbytes, stats().capacity_bytes - (is_replaced ? kept_bytes : 0));
  if (is_replaced) slabs_.front().is_kept = false;
  try {
    add_slab(nbytes, true, lock, free_slabs());
  } catch (const std::exception& error) {
    if (is_replaced) restore_slab(kept_bytes, error.what(), lock);
    throw;
  }
  if (kept_bytes > 0 && !is_replaced) free_when_empty(*std::next(slabs_.begin()), lock);
}

void Tier::restore_slab(uint64_t nbytes, const std::string& failure, std::unique_lock<std::mutex>& lock) {
  try {
    add_slab(nbytes, true, lock);
  } catch (const std::exception& error) {
    throw TierError(failure + ". Nor can the " + format_bytes(nbytes) +
                    " that it had be reserved again: " + error.what());
  }
}

// Its last block may have been released while its successor was allocated.
void Tier::free_when_empty(Slab& slab, std::unique_lock<std::mutex>& lock) {
  slab.is_kept = false;
  Storages freed = free_slabs();
  lock.unlock();  // unpinning takes seconds
  freed.clear();
  lock.lock();
}

void Tier::add_slab(uint64_t nbytes, bool is_kept, std::unique_lock<std::mutex>& lock, Storages replaced) {
  check_limit(nbytes, stats().capacity_bytes);
  std::shared_ptr<Storage> storage;
  make_unlocked(lock, [&] {
    replaced.clear();  // before, not after: the old and the new slab may not fit at the same time
    storage = wiped(allocate(nbytes));
  });
  const auto place = is_kept ? slabs_.begin() : std::ranges::find(slabs_, true, &Slab::is_addressable);
  slabs_.insert(place, {std::move(storage), Arena(nbytes), is_kept, {}});
}

std::vector<Block> Tier::take_together(const std::vector<uint64_t>& sizes, std::unique_lock<std::mutex>& lock) {
  uint64_t total_bytes = 0;
  for (const uint64_t nbytes : sizes) {
    total_bytes += std::min(round_to_pages(nbytes), std::numeric_limits<uint64_t>::max() - total_bytes);
  }
  room_made_.wait(lock, [&] { return !is_making_room_; });
  check_limit(total_bytes, stats().capacity_bytes);
  std::vector<Block> blocks;
  blocks.reserve(sizes.size());
  std::list<Slab> made;
  make_unlocked(lock, [&] {
    std::list<Slab> slabs;  // freed here if one cannot be allocated, not under the lock
    for (const uint64_t nbytes : slab_sizes(sizes)) {
      slabs.push_back({wiped(allocate_addressable(nbytes)), Arena(nbytes), false, {}, true});
    }
    made = std::move(slabs);
  });
  auto slab = made.begin();
  slabs_.splice(slabs_.end(), made);
  uint64_t offset = 0;
  for (const uint64_t nbytes : sizes) {
    if (offset == slab->arena.capacity_bytes()) ++slab, offset = 0;
    slab->arena.take(offset, nbytes);
    blocks.push_back(hold(*slab, offset, nbytes));
    offset += round_to_pages(nbytes);
  }
  return blocks;
}

std::vector<uint64_t> Tier::slab_sizes(const std::vector<uint64_t>& sizes) const {
  std::vector<uint64_t> slabs;
  for (const uint64_t size : sizes) {
    const uint64_t nbytes = round_to_pages(size), max_bytes = max_together_bytes();
    if (slabs.empty() || nbytes > max_bytes - std::min(max_bytes, slabs.back())) slabs.push_back(0);
    slabs.back() += nbytes;
  }
  return slabs;
}

void Tier::extend_slab(uint64_t more_bytes, std::unique_lock<std::mutex>& lock) {
  Slab& slab = slabs_.front();
  const uint64_t nbytes = slab.arena.capacity_bytes() + more_bytes;
  check_limit(more_bytes, stats().capacity_bytes);
  make_unlocked(lock, [&] { extend(*slab.storage, nbytes); });
  slab.arena.grow(nbytes);
}

template <typename Make>
void Tier::make_unlocked(std::unique_lock<std::mutex>& lock, Make make) {
  const double started = monotonic_seconds();
  std::exception_ptr error;
  is_making_room_ = true;
  lock.unlock();
  try {
    make();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  is_making_room_ = false;
  reserve_seconds_ += monotonic_seconds() - started;
  room_made_.notify_all();
  if (error) std::rethrow_exception(error);
}

// The last owner of a slab wipes it, on any thread: a failure can only be logged.
std::shared_ptr<Storage> Tier::wiped(std::shared_ptr<Storage> storage) const {
  if (!wipes_) return storage;
  Storage* const held = storage.get();
  return {held, [storage = std::move(storage)](Storage*) {
            try {
              storage->fill(0, storage->nbytes(), std::byte{0});
            } catch (const std::exception& error) {
              log_error("swapped bytes could not be wiped: " + std::string(error.what()));
            }
          }};
}

// Frees slabs that hold no block, each as soon as the copies that may still access it have finished.
Tier::Storages Tier::free_slabs() {
  Storages freed;
  std::erase_if(slabs_, [&](Slab& slab) {
    if (slab.is_kept || slab.arena.used_bytes() > 0) return false;
    freed.push_back(std::move(slab.storage));
    std::ranges::move(slab.pending.take_all(), std::back_inserter(of_freed_slabs_));
    return true;
  });
  for (; !of_freed_slabs_.empty() && of_freed_slabs_.front()->state.is_finished(); of_freed_slabs_.pop_front()) {
    freed.push_back(of_freed_slabs_.front()->take_storage());
  }
  return freed;
}

Tier::Slab& Tier::slab_of(const Block& block) { return *std::ranges::find(slabs_, block.storage, &Slab::storage); }

void Tier::check_limit(uint64_t more_bytes, uint64_t kept_bytes) const {
  if (more_bytes <= limit_bytes_ && kept_bytes <= limit_bytes_ - more_bytes) return;
  throw TierError(name_ + " tier: " + format_bytes(more_bytes) + " more would exceed its limit of " +
                  format_bytes(limit_bytes_) + "; it has " + format_bytes(kept_bytes) + ", of which " +
                  format_bytes(used_bytes_) + " are held. Raise the limit or swap less");
}

Block Tier::take(uint64_t offset, uint64_t nbytes, std::unique_lock<std::mutex>& lock) {
  for (;;) {
    if (const auto block = find_room(offset, nbytes)) return *block;
    if (is_making_room_) {
      room_made_.wait(lock);
    } else {
      make_room(round_to_pages(nbytes), lock);
    }
  }
}

std::optional<Block> Tier::find_room(uint64_t offset, uint64_t nbytes) {
  if (has_shared() && slabs_.front().arena.take(offset, nbytes)) return hold(slabs_.front(), offset, nbytes);
  for (Slab& slab : slabs_) {
    if (slab.is_addressable) break;
    if (const auto place = slab.arena.take_any(nbytes)) return hold(slab, *place, nbytes);
  }
  return std::nullopt;
}

uint64_t Tier::shared_bytes() const {
  uint64_t nbytes = 0;
  for (const Slab& slab : slabs_) nbytes += slab.is_addressable ? 0 : slab.arena.capacity_bytes();
  return nbytes;
}

// A step without a plan swaps its tensors out one by one, and may have thousands: storage grows geometrically, for many
// of them at once. Where that much cannot be allocated, for fewer, down to exactly what is missing.
void Tier::make_room(uint64_t nbytes, std::unique_lock<std::mutex>& lock) {
  constexpr uint64_t kShare = 4;
  const uint64_t left_bytes = (limit_bytes_ - stats().capacity_bytes) / kPageBytes * kPageBytes;
  const bool is_grown = is_extended() && has_kept();
  const uint64_t missing_bytes = nbytes - (is_grown ? slabs_.front().arena.free_bytes_at_end() : 0);
  const uint64_t wanted_bytes = growth_bytes() > 0 ? std::max(growth_bytes(), shared_bytes() / kShare) : 0;
  for (uint64_t requested_bytes = std::min(wanted_bytes, left_bytes);; requested_bytes /= 2) {
    const uint64_t more_bytes = std::max(missing_bytes, round_to_pages(requested_bytes));
    try {
      return is_grown ? extend_slab(more_bytes, lock) : add_slab(more_bytes, is_extended(), lock);
    } catch (const Error&) {
      if (more_bytes == missing_bytes) throw;
    }
  }
}

Block Tier::hold(Slab& slab, uint64_t offset, uint64_t nbytes) {
  used_bytes_ += round_to_pages(nbytes);
  peak_used_bytes_ = std::max(peak_used_bytes_, used_bytes_);
  return Block{slab.storage, offset, nbytes};
}

Tier::Storages Tier::release(const Block& block, const std::vector<TransferPointer>& users) {
  used_bytes_ -= round_to_pages(block.nbytes);
  Slab& slab = slab_of(block);
  slab.arena.release(block.offset);
  // The first copy into the block ran behind those of its previous holders: waiting for it implies waiting for them.
  std::vector<TransferPointer> ended;
  if (!users.empty() && users.front()->state.has_landed()) ended = slab.pending.take_within(block);
  for (const TransferPointer& user : users) {
    // Copies in the kept slab that a stream has waited for are not polled in each step.
    const bool polls = !slab.is_kept || !user->state.was_waited_for();
    if (user->state.has_failed() || (polls && user->state.is_finished())) {
      ended.push_back(user);
    } else {
      slab.pending.add(user);
    }
  }
  Storages dropped = free_slabs();
  for (const TransferPointer& user : ended) dropped.push_back(user->take_storage());
  return dropped;
}

std::vector<TransferPointer> Tier::dependencies(const Block& block, StreamId stream) {
  if (!of_freed_slabs_.empty()) free_slabs();
  PendingTransfers& pending = slab_of(block).pending;
  for (const TransferPointer& user : pending.take_finished_if_many()) user->take_storage();
  std::vector<TransferPointer> dependencies;
  for (const TransferPointer& user : pending.overlapping(block)) {
    if (user->state.precedes(stream)) continue;
    if (user->state.is_finished()) {
      pending.remove(user);
      user->take_storage();
    } else {
      dependencies.push_back(user);
    }
  }
  return dependencies;
}

TierStats Tier::stats() const {
  TierStats stats{.used_bytes = used_bytes_, .peak_used_bytes = peak_used_bytes_, .reserve_seconds = reserve_seconds_};
  for (const Slab& slab : slabs_) stats.capacity_bytes += slab.arena.capacity_bytes();
  stats.resident_bytes = stats.peak_resident_bytes = stats.capacity_bytes;
  return stats;
}

}  // namespace lmswap
