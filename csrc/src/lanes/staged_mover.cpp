#include "lmswap/lanes/staged_mover.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "lmswap/error.h"

namespace lmswap {

StagedMover::StagedMover(std::shared_ptr<Driver> driver, IoPool& pool, int num_pieces, Pacer pacer)
    : driver_(std::move(driver)),
      pool_(pool),
      stream_(driver_),
      memory_(driver_, static_cast<uint64_t>(num_pieces) * kRequestBytes),
      pacer_(std::move(pacer)) {
  for (uint64_t i = 0; i < static_cast<uint64_t>(num_pieces); ++i) {
    pieces_.push_back(std::make_unique<Piece>(driver_, memory_.data() + i * kRequestBytes));
  }
}

// No swapped bytes stay behind in memory that is given back; 32 MiB take some milliseconds, so this is not asked for.
StagedMover::~StagedMover() { memory_.fill(0, memory_.nbytes(), std::byte{0}); }

void StagedMover::move(const TransferPointer& transfer) {
  // `ready` protects the device memory: what the caller's stream still writes into it, or reads from its last owner.
  // The thread waits for it too, so that requests never occupy the I/O threads while the device computes.
  transfer->ready.make_wait(stream_.handle());
  transfer->mark_start(stream_.handle());
  const double ready_seconds = transfer->wait_ready();
  for (uint64_t begin = 0; begin < transfer->block.nbytes && !transfer->is_failing(); begin += kRequestBytes) {
    const uint64_t nbytes = std::min(kRequestBytes, transfer->block.nbytes - begin);
    request(transfer, next_piece(), begin, nbytes);
    if (pacer_.is_limiting()) transfer->link_start->note(pacer_.pace(nbytes, ready_seconds));
  }
  if (transfer->direction == Direction::kIn || transfer->is_failing()) return;
  // Out of the device after the last queued copy, though not yet in the file.
  transfer->done->record(stream_.handle());
  transfer->set_issued();
}

// Pieces are used in turn, so the next one is the one that has been under way for longest.
StagedMover::Piece& StagedMover::next_piece() {
  Piece& piece = *pieces_[next_];
  next_ = (next_ + 1) % pieces_.size();
  piece.window.enter();
  return piece;
}

void StagedMover::request(const TransferPointer& transfer, Piece& piece, uint64_t begin, uint64_t nbytes) {
  try {
    // `copied` protects the piece: the device may still read it for the request that used it last.
    if (piece.is_recorded) piece.copied.synchronize();
    if (transfer->direction == Direction::kOut) {
      driver_->copy_out(piece.data, transfer->device + begin, nbytes, stream_.handle());
      piece.copied.record(stream_.handle());
      piece.is_recorded = true;
    }
  } catch (...) {
    piece.window.leave();
    throw;
  }
  transfer->begin_part();
  pool_.submit([this, transfer, &piece, begin, nbytes](Bounce bounce) {
    try {
      if (transfer->direction == Direction::kOut) {
        write(*transfer, piece, begin, nbytes, bounce);
      } else {
        read(*transfer, piece, begin, nbytes, bounce);
      }
    } catch (const std::exception& error) {
      transfer->fail(error);
    }
    if (transfer->finish_part()) complete(transfer);
    piece.window.leave();
  });
}

void StagedMover::write(Transfer& transfer, Piece& piece, uint64_t begin, uint64_t nbytes, Bounce bounce) {
  piece.copied.synchronize();  // protects the piece's bytes: they may not have arrived from the device yet
  transfer.note(begin, piece.data, nbytes);
  static_cast<IoStorage&>(*transfer.block.storage).write(transfer.block.offset + begin, piece.data, nbytes, bounce);
}

void StagedMover::read(Transfer& transfer, Piece& piece, uint64_t begin, uint64_t nbytes, Bounce bounce) {
  static_cast<IoStorage&>(*transfer.block.storage).read(transfer.block.offset + begin, piece.data, nbytes, bounce);
  transfer.compare(begin, piece.data, nbytes);
  driver_->copy_in(transfer.device + begin, piece.data, nbytes, stream_.handle());
  piece.copied.record(stream_.handle());
  piece.is_recorded = true;
}

void StagedMover::complete(const TransferPointer& transfer) noexcept {
  try {
    // Behind the copies of all pieces: they are queued before their parts end.
    if (transfer->direction == Direction::kIn && !transfer->is_failing()) transfer->done->record(stream_.handle());
  } catch (const std::exception& error) {
    transfer->fail(error);
  }
  if (transfer->is_failing()) stream_.drain();
  transfer->settle();
}

void StagedMover::drain() noexcept {
  for (const auto& piece : pieces_) piece->window.wait_until_empty();
  stream_.drain();
}

}  // namespace lmswap
