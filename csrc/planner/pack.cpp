#include "pack.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <utility>

namespace lmswap::planner {
namespace {

using Order = std::vector<int>;  // of blocks: the order of placement

// After this many tries without a better packing, a slightly worse one is accepted and improved: of 15 steps of five
// networks, packings were up to 4 % smaller than if only better ones are accepted.
constexpr int kPatience = 40;
constexpr Bytes kToleranceDivisor = 200;  // 0.5 %
// After this many tries without a better one it ends: of the same 15, later ones gained 3 % once, 1 % twice, else
// nothing.
constexpr int kMaxFruitlessTries = 3000;
// A moved block is up to this many blocks below the top.
constexpr unsigned kMaxDepth = 8;

bool overlap(const Block& one, const Block& other) { return one.start < other.stop && other.start < one.stop; }

Bytes peak_bytes(const std::vector<Block>& blocks) {
  std::vector<std::pair<int, Bytes>> changes;
  for (const auto& block : blocks) {
    changes.emplace_back(block.start, block.nbytes);
    changes.emplace_back(block.stop, -block.nbytes);
  }
  std::sort(changes.begin(), changes.end());
  Bytes held = 0, most = 0;
  for (const auto& [position, change] : changes) most = std::max(most, held += change);
  return most;
}

class Packer {
 public:
  Packer(const std::vector<Block>& blocks, Bytes separation_bytes)
      : blocks_(blocks), separation_bytes_(separation_bytes) {}

  // Each block in turn gets the lowest offset that is free during its lifetime; the one below it is placed before it.
  Packing first_fit(const Order& order) {
    Packing packing{std::vector<Bytes>(blocks_.size(), kUnplaced), 0};
    placed_.clear();
    for (const int index : order) place(index, packing);
    return packing;
  }

  [[nodiscard]] std::int64_t visits() const { return visits_; }

 private:
  struct Placed {
    Bytes offset;
    Block block;
  };
  static constexpr Bytes kUnplaced = -1;

  void place(int index, Packing& packing) {
    const auto& block = blocks_[static_cast<std::size_t>(index)];
    Bytes& at = packing.offsets[static_cast<std::size_t>(index)];
    if (at != kUnplaced) return;
    Bytes offset = 0;
    if (block.above != kNone) {
      place(block.above, packing);
      const auto below = static_cast<std::size_t>(block.above);
      offset = packing.offsets[below] + blocks_[below].nbytes;
    }
    offset = lowest_free(block, offset);
    const auto after = std::upper_bound(placed_.begin(), placed_.end(), offset,
                                        [](Bytes to, const Placed& other) { return to < other.offset; });
    placed_.insert(after, {offset, block});
    at = offset;
    packing.capacity_bytes = std::max(packing.capacity_bytes, offset + block.nbytes);
  }

  // The lowest free offset for the block, from `offset` on.
  Bytes lowest_free(const Block& block, Bytes offset) {
    overlapping_.clear();
    offset = past_all_overlapping(block, offset);
    for (const auto& other : placed_) {
      ++visits_;
      if (!overlap(other.block, block)) continue;
      if (other.offset - offset >= block.nbytes + separation_bytes_) break;
      overlapping_.push_back(other);
      if (next_allowed(block, other, offset) != offset) offset = past_all_overlapping(block, offset);
    }
    return offset;
  }

  // Moving off one overlapping block may come too near to another; blocks further below cannot overlap any more.
  Bytes past_all_overlapping(const Block& block, Bytes offset) {
    for (Bytes before = -1; offset != before;) {
      before = offset;
      if (offset > 0) offset = std::max(offset, separation_bytes_);
      for (const auto& other : overlapping_) offset = next_allowed(block, other, offset);
      visits_ += static_cast<std::int64_t>(overlapping_.size());
    }
    std::erase_if(overlapping_,
                  [&](const Placed& other) { return other.offset + other.block.nbytes + separation_bytes_ <= offset; });
    return offset;
  }

  // From `offset` on: blocks with overlapping lifetimes touch, if they are of no group, or are apart.
  [[nodiscard]] Bytes next_allowed(const Block& block, const Placed& other, Bytes offset) const {
    const Bytes below = other.offset - block.nbytes, above = other.offset + other.block.nbytes;
    if (offset <= below - separation_bytes_ || offset >= above + separation_bytes_) return offset;
    if (block.group != kNone && block.group == other.block.group) return above + separation_bytes_;
    return offset <= below ? below : offset <= above ? above : above + separation_bytes_;
  }

  const std::vector<Block>& blocks_;
  const Bytes separation_bytes_;
  std::vector<Placed> placed_;       // by offset
  std::vector<Placed> overlapping_;  // of these, by offset, those compared with the block that is placed now
  std::int64_t visits_ = 0;
};

template <typename Key>
Order order_by(const std::vector<Block>& blocks, Key key) {
  Order order(blocks.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int one, int other) {
    return key(blocks[static_cast<std::size_t>(one)]) < key(blocks[static_cast<std::size_t>(other)]);
  });
  return order;
}

std::vector<Order> first_orders(const std::vector<Block>& blocks) {
  using Pair = std::pair<Bytes, Bytes>;
  return {
      // Largest first; largest area first; longest first, as a step's swaps are nested like brackets; and in order of
      // time.
      order_by(blocks, [](const Block& block) { return Pair(-block.nbytes, block.start - block.stop); }),
      order_by(blocks, [](const Block& block) { return Pair(-block.nbytes * (block.stop - block.start), 0); }),
      order_by(blocks, [](const Block& block) { return Pair(block.start - block.stop, -block.nbytes); }),
      order_by(blocks, [](const Block& block) { return Pair(block.start, -block.nbytes); }),
  };
}

// Blocks that are all held at one time, as the nested swaps of a chain of layers: the packing that first fit in the
// first order would find, which takes time with the square of their number there.
std::optional<Packing> stack(const std::vector<Block>& blocks, Bytes separation_bytes, Bytes held_bytes) {
  Bytes total_bytes = 0;
  for (const auto& block : blocks) {
    if (block.above != kNone) return std::nullopt;
    total_bytes += block.nbytes;
  }
  if (separation_bytes > 0 || total_bytes > held_bytes) return std::nullopt;
  Packing packing{std::vector<Bytes>(blocks.size()), 0};
  const std::vector<Order> orders = first_orders(blocks);
  for (const int index : orders.front()) {
    packing.offsets[static_cast<std::size_t>(index)] = packing.capacity_bytes;
    packing.capacity_bytes += blocks[static_cast<std::size_t>(index)].nbytes;
  }
  return packing;
}

class Improver {
 public:
  Improver(const std::vector<Block>& blocks, Packer& packer) : blocks_(blocks), packer_(packer) {}

  // Improves `order`, whose packing is `now`; updates `best` if the result is better.
  void improve(Order order, Packing now, Packing& best, Bytes bound, std::int64_t max_visits) {
    Bytes smallest = now.capacity_bytes;
    int tries = 0, fruitless = 0;
    while (best.capacity_bytes > bound && packer_.visits() < max_visits && fruitless < kMaxFruitlessTries) {
      Order next = order;
      place_earlier(next, choose(now));
      Packing found = packer_.first_fit(next);
      const bool is_tolerable = found.capacity_bytes <= now.capacity_bytes + now.capacity_bytes / kToleranceDivisor;
      if (found.capacity_bytes <= now.capacity_bytes || (tries > kPatience && is_tolerable)) {
        if (found.capacity_bytes > now.capacity_bytes) tries = 0;
        order = std::move(next);
        now = std::move(found);
      }
      ++tries;
      ++fruitless;
      if (now.capacity_bytes < smallest) {
        smallest = now.capacity_bytes;
        tries = fruitless = 0;
      }
      if (now.capacity_bytes < best.capacity_bytes) best = now;
    }
  }

 private:
  // A block at the top, or, every second time, one below it.
  int choose(const Packing& packing) {
    std::vector<int> found = ending_at(packing, packing.capacity_bytes, nullptr);
    int chosen = pick_any(found);
    for (auto depth = random_() % 2 != 0 ? random_() % kMaxDepth : 0; depth > 0; --depth) {
      const auto& block = blocks_[static_cast<std::size_t>(chosen)];
      found = ending_at(packing, packing.offsets[static_cast<std::size_t>(chosen)], &block);
      if (found.empty()) break;
      chosen = pick_any(found);
    }
    return chosen;
  }

  std::vector<int> ending_at(const Packing& packing, Bytes end, const Block* overlapping_with) {
    std::vector<int> found;
    for (std::size_t index = 0; index < blocks_.size(); ++index) {
      if (packing.offsets[index] + blocks_[index].nbytes != end) continue;
      if (overlapping_with == nullptr || overlap(blocks_[index], *overlapping_with))
        found.push_back(static_cast<int>(index));
    }
    return found;
  }

  // Moves it before a block with an overlapping lifetime that was placed earlier.
  void place_earlier(Order& order, int chosen) {
    const auto at = std::find(order.begin(), order.end(), chosen);
    std::vector<std::ptrdiff_t> targets;
    for (auto other = order.begin(); other != at; ++other) {
      if (overlap(blocks_[static_cast<std::size_t>(*other)], blocks_[static_cast<std::size_t>(chosen)]))
        targets.push_back(other - order.begin());
    }
    if (targets.empty()) return;
    const auto target = targets[random_() % targets.size()];
    order.erase(at);
    order.insert(order.begin() + target, chosen);
  }

  int pick_any(const std::vector<int>& of) { return of[random_() % of.size()]; }

  const std::vector<Block>& blocks_;
  Packer& packer_;
  std::mt19937 random_{1};  // equal inputs get equal offsets
};

}  // namespace

Packing pack(const std::vector<Block>& blocks, Bytes separation_bytes, std::int64_t max_visits) {
  if (blocks.empty()) return {};
  const Bytes bound = peak_bytes(blocks);
  if (const auto stacked = stack(blocks, separation_bytes, bound)) return *stacked;
  Packer packer(blocks, separation_bytes);
  std::vector<std::pair<Packing, Order>> starts;
  for (const auto& order : first_orders(blocks)) {
    starts.emplace_back(packer.first_fit(order), order);
    if (starts.back().first.capacity_bytes == bound) break;
  }
  std::stable_sort(starts.begin(), starts.end(), [](const auto& one, const auto& other) {
    return one.first.capacity_bytes < other.first.capacity_bytes;
  });
  Packing best = starts.front().first;
  Improver improver(blocks, packer);
  for (auto& [packing, order] : starts) {
    improver.improve(std::move(order), std::move(packing), best, bound, max_visits);
  }
  return best;
}

}  // namespace lmswap::planner
