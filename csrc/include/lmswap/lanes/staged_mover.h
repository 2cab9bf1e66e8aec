// Device <-> file through pieces of pinned memory, several of them under way at once.
#pragma once

#include <memory>
#include <vector>

#include "lmswap/driver/stream.h"
#include "lmswap/lanes/mover.h"
#include "lmswap/lanes/pacer.h"
#include "lmswap/lanes/window.h"
#include "lmswap/tiers/io_pool.h"

namespace lmswap {

class StagedMover final : public Mover {
 public:
  StagedMover(std::shared_ptr<Driver> driver, IoPool& pool, int num_pieces, Pacer pacer);
  ~StagedMover() override;
  void move(const TransferPointer& transfer) override;
  void complete(const TransferPointer& transfer) noexcept override;
  void drain() noexcept override;

 private:
  // Staging memory for one request: in the window while a thread uses it, after that `copied` protects its bytes.
  struct Piece {
    Piece(const std::shared_ptr<Driver>& driver, std::byte* memory) : data(memory), copied(driver) {}
    std::byte* data;
    Event copied;
    bool is_recorded = false;
    Window window{1};
  };

  Piece& next_piece();
  void request(const TransferPointer& transfer, Piece& piece, uint64_t begin, uint64_t nbytes);
  void write(Transfer& transfer, Piece& piece, uint64_t begin, uint64_t nbytes, Bounce bounce);
  void read(Transfer& transfer, Piece& piece, uint64_t begin, uint64_t nbytes, Bounce bounce);

  std::shared_ptr<Driver> driver_;
  IoPool& pool_;
  Stream stream_;
  PinnedMemory memory_;
  std::vector<std::unique_ptr<Piece>> pieces_;
  size_t next_ = 0;
  Pacer pacer_;
};

}  // namespace lmswap
