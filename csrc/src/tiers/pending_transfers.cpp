#include "lmswap/tiers/pending_transfers.h"

#include <algorithm>
#include <iterator>

namespace lmswap {

void PendingTransfers::add(const TransferPointer& transfer) {
  const Block& block = transfer->block;
  entries_.push_back({transfer, {}});
  entries_.back().position =
      by_offset_.emplace(std::pair(block.storage.get(), block.offset), std::prev(entries_.end()));
  longest_bytes_ = std::max(longest_bytes_, block.nbytes);
}

std::vector<TransferPointer> PendingTransfers::take_within(const Block& block) {
  std::vector<TransferPointer> taken;
  const uint64_t end = block.offset + block.nbytes;
  auto position = by_offset_.lower_bound({block.storage.get(), block.offset});
  while (position != by_offset_.end() &&
         position->first < std::pair<const Storage*, uint64_t>(block.storage.get(), end)) {
    const auto entry = position->second;
    if (entry->transfer->block.offset + entry->transfer->block.nbytes > end) {
      ++position;
      continue;
    }
    taken.push_back(std::move(entry->transfer));
    position = by_offset_.erase(position);
    entries_.erase(entry);
  }
  return taken;
}

std::vector<TransferPointer> PendingTransfers::take_until(const std::function<bool(const TransferPointer&)>& stays) {
  std::vector<TransferPointer> taken;
  while (!entries_.empty() && !stays(entries_.front().transfer)) {
    taken.push_back(std::move(entries_.front().transfer));
    by_offset_.erase(entries_.front().position);
    entries_.pop_front();
  }
  if (entries_.empty()) longest_bytes_ = 0;
  return taken;
}

std::vector<TransferPointer> PendingTransfers::overlapping(const Block& block) const {
  std::vector<TransferPointer> found;
  const uint64_t first = block.offset - std::min(block.offset, longest_bytes_);
  const auto stop = by_offset_.lower_bound({block.storage.get(), block.offset + block.nbytes});
  for (auto position = by_offset_.lower_bound({block.storage.get(), first}); position != stop; ++position) {
    const TransferPointer& transfer = position->second->transfer;
    if (transfer->block.offset + transfer->block.nbytes > block.offset) found.push_back(transfer);
  }
  return found;
}

bool PendingTransfers::any_of(const std::function<bool(const TransferPointer&)>& predicate) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) { return predicate(entry.transfer); });
}

}  // namespace lmswap
