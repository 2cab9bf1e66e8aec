#include "lmswap/tier.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "lmswap/error.h"
#include "lmswap/stream.h"

namespace lmswap {

void Tier::reserve(uint64_t nbytes) {
  nbytes = round_to_pages(nbytes);
  const bool has_planned = !slabs_.empty() && slabs_.front().is_planned;
  if (nbytes == 0 || (has_planned && slabs_.front().storage->nbytes() >= nbytes)) return;
  const bool is_replaced = has_planned && slabs_.front().arena.used_bytes() == 0;
  check_limit(nbytes, stats().capacity_bytes - (is_replaced ? slabs_.front().storage->nbytes() : 0));
  if (has_planned) slabs_.front().is_planned = false;
  forget_finished_users();  // they hold on to their slabs
  // Given back first, not after: the old and the new slab may not fit beside each other.
  drop_empty_slabs();
  slabs_.push_front({make_storage(nbytes), Arena(nbytes), true});
}

// Whoever holds a slab last wipes it, on whatever thread: there is nobody who could be told that it failed.
std::shared_ptr<Storage> Tier::make_storage(uint64_t nbytes) {
  std::shared_ptr<Storage> storage = allocate(nbytes);
  if (!wiper_) return storage;
  Storage* const held = storage.get();
  return {held, [storage = std::move(storage), stream = std::make_shared<Stream>(wiper_)](Storage*) {
            try {
              storage->fill(0, storage->nbytes(), std::byte{0}, stream->handle());
            } catch (const std::exception& error) {
              complain("swapped bytes could not be wiped: " + std::string(error.what()));
            }
          }};
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
  slabs_.push_back({make_storage(slab_bytes), Arena(slab_bytes), false});
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

// They finish about in the order in which their blocks were released. To ask each of them at each copy would be
// quadratic: a host that is a step ahead has a step's copies under way.
void Tier::forget_finished_users() {
  const auto unfinished =
      std::find_if(users_.begin(), users_.end(), [](const TransferPointer& user) { return !user->is_finished(); });
  users_.erase(users_.begin(), unfinished);
}

std::vector<TransferPointer> Tier::fences(const Block& block) {
  forget_finished_users();
  std::vector<TransferPointer> fences;
  std::copy_if(users_.begin(), users_.end(), std::back_inserter(fences), [&](const TransferPointer& user) {
    const Block& other = user->block;
    return other.storage == block.storage && other.offset < block.offset + block.nbytes &&
           block.offset < other.offset + other.nbytes && !user->is_finished();
  });
  return fences;
}

TierStats Tier::stats() const {
  TierStats stats{0, used_bytes_, peak_used_bytes_};
  for (const Slab& slab : slabs_) stats.capacity_bytes += slab.storage->nbytes();
  return stats;
}

}  // namespace lmswap
