// Copies that may still read or write bytes of a tier on behalf of holders that gave these back.
//
// A step may release thousands of blocks: what is asked of one block takes a logarithm of their number, not a look at
// each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <utility>
#include <vector>

#include "lmswap/lanes/transfer.h"

namespace lmswap {

class PastUsers {
 public:
  void add(const TransferPointer& user);

  // Removes and returns those whose bytes all lie in the block.
  std::vector<TransferPointer> take_within(const Block& block);
  // Removes and returns those that were added first, up to one that `stays`.
  std::vector<TransferPointer> take_first(const std::function<bool(const TransferPointer&)>& stays);
  // Those that use bytes of the block.
  std::vector<TransferPointer> meeting(const Block& block) const;

  bool any_of(const std::function<bool(const TransferPointer&)>& is_such) const;
  size_t size() const { return users_.size(); }

 private:
  struct User;
  using Users = std::list<User>;
  using ByPlace = std::multimap<std::pair<const Storage*, uint64_t>, Users::iterator>;
  struct User {
    TransferPointer transfer;
    ByPlace::iterator place;
  };

  Users users_;       // in the order in which they were added
  ByPlace by_place_;  // by storage and offset
  uint64_t longest_bytes_ = 0;
};

}  // namespace lmswap
