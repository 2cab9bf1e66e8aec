#include "lmswap/tiers/tier.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "lmswap/clock.h"
#include "lmswap/error.h"

namespace lmswap {
namespace {

bool is_within(const Block& inner, const Block& outer) {
  return inner.storage == outer.storage && inner.offset >= outer.offset &&
         inner.offset + inner.nbytes <= outer.offset + outer.nbytes;
}

}  // namespace

void Tier::reserve(uint64_t nbytes, bool anew, std::unique_lock<std::mutex>& lock) {
  nbytes = round_to_pages(nbytes);
  room_made_.wait(lock, [&] { return !is_making_room_; });
  const uint64_t kept_bytes = has_kept() ? slabs_.front().arena.capacity_bytes() : 0;
  if (nbytes <= kept_bytes && !anew) return;
  if (has_kept() && is_extended() && !anew) return extend_slab(nbytes - kept_bytes, lock);
  const bool is_replaced = has_kept() && slabs_.front().arena.used_bytes() == 0;
  check_limit(nbytes, stats().capacity_bytes - (is_replaced ? kept_bytes : 0));
  if (has_kept()) slabs_.front().is_kept = false;
  Storages replaced = forget_finished_users();  // they hold on to their slabs
  drop_empty_slabs(replaced);
  add_slab(nbytes, true, lock, std::move(replaced));
}

void Tier::add_slab(uint64_t nbytes, bool is_kept, std::unique_lock<std::mutex>& lock, Storages replaced) {
  check_limit(nbytes, stats().capacity_bytes);
  std::shared_ptr<Storage> storage;
  make_unlocked(lock, [&] {
    replaced.clear();  // first, not after: the old and the new slab may not fit beside each other
    storage = make_storage(nbytes);
  });
  slabs_.insert(is_kept ? slabs_.begin() : slabs_.end(), {std::move(storage), Arena(nbytes), is_kept});
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

// Whoever holds a slab last wipes it, on whatever thread: there is nobody who could be told that it failed.
std::shared_ptr<Storage> Tier::make_storage(uint64_t nbytes) {
  std::shared_ptr<Storage> storage = allocate(nbytes);
  if (!wipes_) return storage;
  Storage* const held = storage.get();
  return {held, [storage = std::move(storage)](Storage*) {
            try {
              storage->fill(0, storage->nbytes(), std::byte{0});
            } catch (const std::exception& error) {
              complain("swapped bytes could not be wiped: " + std::string(error.what()));
            }
          }};
}

void Tier::drop_empty_slabs(Storages& dropped) {
  std::erase_if(slabs_, [&](Slab& slab) {
    if (slab.is_kept || slab.arena.used_bytes() > 0) return false;
    dropped.push_back(std::move(slab.storage));
    return true;
  });
}

void Tier::check_limit(uint64_t more_bytes, uint64_t kept_bytes) const {
  if (more_bytes <= limit_bytes_ && kept_bytes <= limit_bytes_ - more_bytes) return;
  throw Error(ErrorKind::kTier, name_ + " tier: " + format_bytes(more_bytes) + " more would exceed its limit of " +
                                    format_bytes(limit_bytes_) + "; it has " + format_bytes(kept_bytes) +
                                    ", of which " + format_bytes(used_bytes_) +
                                    " are held. Raise the limit or swap less");
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
  if (!slabs_.empty() && slabs_.front().arena.take(offset, nbytes)) return hold(slabs_.front(), offset, nbytes);
  for (Slab& slab : slabs_) {
    if (const auto place = slab.arena.take_any(nbytes)) return hold(slab, *place, nbytes);
  }
  return std::nullopt;
}

// What can be extended is, by no little: the tensors of a step without a plan come one by one. By less where that is
// not to be had, down to what is missing.
void Tier::make_room(uint64_t nbytes, std::unique_lock<std::mutex>& lock) {
  constexpr uint64_t kLeastBytes = 256 << 20;
  if (!is_extended()) return add_slab(nbytes, false, lock);
  const uint64_t capacity_bytes = stats().capacity_bytes;
  const uint64_t left_bytes = (limit_bytes_ - capacity_bytes) / kPageBytes * kPageBytes;
  const uint64_t missing_bytes = nbytes - (has_kept() ? slabs_.front().arena.free_bytes_at_end() : 0);
  for (uint64_t asked_bytes = std::min(kLeastBytes, left_bytes);; asked_bytes /= 2) {
    const uint64_t more_bytes = std::max(missing_bytes, round_to_pages(asked_bytes));
    try {
      return has_kept() ? extend_slab(more_bytes, lock) : add_slab(more_bytes, true, lock);
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
  const auto slab =
      std::find_if(slabs_.begin(), slabs_.end(), [&](const Slab& other) { return other.storage == block.storage; });
  Storages dropped;
  // The first copy into the block ran behind those of its holders before: who waits for the one waits for the others.
  const bool has_landed = !users.empty() && users.front()->has_landed();
  std::erase_if(users_, [&](const TransferPointer& user) {
    if (!user->has_failed() && !(has_landed && is_within(user->block, block))) return false;
    dropped.push_back(user->take_storage());
    return true;
  });
  for (const TransferPointer& user : users) {
    // Of copies that a stream waited for, in the slab that stays, the device need not be asked in each step.
    const bool must_ask_for = must_ask(user);
    if (user->has_failed() || (must_ask_for && user->is_finished())) {
      dropped.push_back(user->take_storage());
    } else {
      users_.push_back(user);
      asks_ |= must_ask_for;
    }
  }
  slab->arena.release(block.offset);
  drop_empty_slabs(dropped);
  return dropped;
}

// They finish about in the order in which their blocks were released. To ask each of them at each copy would be
// quadratic: a host that is a step ahead has a step's copies under way.
Tier::Storages Tier::forget_finished_users() {
  const auto unfinished =
      std::find_if(users_.begin(), users_.end(), [](const TransferPointer& user) { return !user->is_finished(); });
  Storages dropped;
  std::transform(users_.begin(), unfinished, std::back_inserter(dropped),
                 [](const TransferPointer& user) { return user->take_storage(); });
  users_.erase(users_.begin(), unfinished);
  most_users_ = std::max(kFewUsers, 2 * users_.size());
  asks_ = std::any_of(users_.begin(), users_.end(), [&](const TransferPointer& user) { return must_ask(user); });
  return dropped;
}

// Whether it matters when the copy has ended: its slab is given back with its last block, or no stream is behind it.
bool Tier::must_ask(const TransferPointer& user) const {
  const bool is_kept = has_kept() && user->block.storage == slabs_.front().storage;
  return !is_kept || !user->was_waited_for();
}

std::vector<TransferPointer> Tier::fences(const Block& block, StreamId stream) {
  if (users_.size() > most_users_ || asks_) forget_finished_users();
  std::vector<TransferPointer> fences;
  std::copy_if(users_.begin(), users_.end(), std::back_inserter(fences), [&](const TransferPointer& user) {
    const Block& other = user->block;
    return other.storage == block.storage && other.offset < block.offset + block.nbytes &&
           block.offset < other.offset + other.nbytes && !user->precedes(stream) && !user->is_finished();
  });
  return fences;
}

TierStats Tier::stats() const {
  TierStats stats{.used_bytes = used_bytes_, .peak_used_bytes = peak_used_bytes_, .reserve_seconds = reserve_seconds_};
  for (const Slab& slab : slabs_) stats.capacity_bytes += slab.arena.capacity_bytes();
  stats.resident_bytes = stats.peak_resident_bytes = stats.capacity_bytes;
  return stats;
}

}  // namespace lmswap
