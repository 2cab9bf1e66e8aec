#include "lmswap/tiers/past_users.h"

#include <algorithm>
#include <iterator>

namespace lmswap {

void PastUsers::add(const TransferPointer& user) {
  const Block& block = user->block;
  users_.push_back({user, {}});
  users_.back().place = by_place_.emplace(std::pair(block.storage.get(), block.offset), std::prev(users_.end()));
  longest_bytes_ = std::max(longest_bytes_, block.nbytes);
}

std::vector<TransferPointer> PastUsers::take_within(const Block& block) {
  std::vector<TransferPointer> taken;
  const uint64_t end = block.offset + block.nbytes;
  auto place = by_place_.lower_bound({block.storage.get(), block.offset});
  while (place != by_place_.end() && place->first < std::pair<const Storage*, uint64_t>(block.storage.get(), end)) {
    const auto user = place->second;
    if (user->transfer->block.offset + user->transfer->block.nbytes > end) {
      ++place;
      continue;
    }
    taken.push_back(std::move(user->transfer));
    place = by_place_.erase(place);
    users_.erase(user);
  }
  return taken;
}

std::vector<TransferPointer> PastUsers::take_first(const std::function<bool(const TransferPointer&)>& stays) {
  std::vector<TransferPointer> taken;
  while (!users_.empty() && !stays(users_.front().transfer)) {
    taken.push_back(std::move(users_.front().transfer));
    by_place_.erase(users_.front().place);
    users_.pop_front();
  }
  if (users_.empty()) longest_bytes_ = 0;
  return taken;
}

std::vector<TransferPointer> PastUsers::meeting(const Block& block) const {
  std::vector<TransferPointer> found;
  const uint64_t first = block.offset - std::min(block.offset, longest_bytes_);
  const auto stop = by_place_.lower_bound({block.storage.get(), block.offset + block.nbytes});
  for (auto place = by_place_.lower_bound({block.storage.get(), first}); place != stop; ++place) {
    const TransferPointer& user = place->second->transfer;
    if (user->block.offset + user->block.nbytes > block.offset) found.push_back(user);
  }
  return found;
}

bool PastUsers::any_of(const std::function<bool(const TransferPointer&)>& is_such) const {
  return std::any_of(users_.begin(), users_.end(), [&](const User& user) { return is_such(user.transfer); });
}

}  // namespace lmswap
