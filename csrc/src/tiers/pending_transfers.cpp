#include "lmswap/tiers/pending_transfers.h"

#include <algorithm>
#include <iterator>

namespace lmswap {

void PendingTransfers::add(const TransferPointer& transfer) {
  const Block& block = transfer->block;
  entries_.push_back({transfer, {}});
  entries_.back().position = by_offset_.emplace(block.offset, std::prev(entries_.end()));
  longest_bytes_ = std::max(longest_bytes_, block.nbytes);
}

void PendingTransfers::remove(const TransferPointer& transfer) {
  auto position = by_offset_.lower_bound(transfer->block.offset);
  while (position->second->transfer != transfer) ++position;
  entries_.erase(position->second);
  by_offset_.erase(position);
}

std::vector<TransferPointer> PendingTransfers::take_within(const Block& block) {
  std::vector<TransferPointer> taken;
  const uint64_t end = block.offset + block.nbytes;
  auto position = by_offset_.lower_bound(block.offset);
  while (position != by_offset_.end() && position->first < end) {
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

std::vector<TransferPointer> PendingTransfers::take_finished_if_many() {
  std::vector<TransferPointer> taken;
  if (entries_.size() <= max_) return taken;
  while (!entries_.empty() && entries_.front().transfer->state.is_finished()) {
    taken.push_back(std::move(entries_.front().transfer));
    by_offset_.erase(entries_.front().position);
    entries_.pop_front();
  }
  max_ = std::max(kFew, 2 * entries_.size());
  if (entries_.empty()) longest_bytes_ = 0;
  return taken;
}

std::vector<TransferPointer> PendingTransfers::take_all() {
  std::vector<TransferPointer> taken;
  for (Entry& entry : entries_) taken.push_back(std::move(entry.transfer));
  entries_.clear();
  by_offset_.clear();
  longest_bytes_ = 0;
  return taken;
}

std::vector<TransferPointer> PendingTransfers::overlapping(const Block& block) const {
  std::vector<TransferPointer> found;
  const uint64_t first = block.offset - std::min(block.offset, longest_bytes_);
  const auto stop = by_offset_.lower_bound(block.offset + block.nbytes);
  for (auto position = by_offset_.lower_bound(first); position != stop; ++position) {
    const TransferPointer& transfer = position->second->transfer;
    if (transfer->block.offset + transfer->block.nbytes > block.offset) found.push_back(transfer);
  }
  return found;
}

}  // namespace lmswap
