#include "lmswap/lanes/gated_mover.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "lmswap/error.h"
#include "lmswap/tiers/arena.h"

namespace lmswap {

void Marks::pass(uint64_t number, int code) {
  const std::lock_guard lock(mutex_);
  last_ = number;
  skipped_.erase(skipped_.begin(), skipped_.lower_bound(number));
  if (code != 0) error_ = "CUDA's error " + std::to_string(code);
  changed_.notify_all();
}

void Marks::fail(const std::string& text) {
  const std::lock_guard lock(mutex_);
  error_ = text;
  changed_.notify_all();
}

void Marks::skip(uint64_t number) {
  const std::lock_guard lock(mutex_);
  skipped_.insert(number);
  changed_.notify_all();
}

bool Marks::await(uint64_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return last_ >= number || skipped_.contains(number) || !error_.empty(); });
  return error_.empty();
}

std::string Marks::error_text() const {
  const std::lock_guard lock(mutex_);
  return "the device failed while a copy waited for it: " + error_;
}

GatedMover::GatedMover(std::shared_ptr<Driver> driver, IoPool& pool, int num_pieces, const Pacer& pacer)
    : driver_(std::move(driver)),
      pool_(pool),
      stream_(driver_),
      link_(GatedLink::make(driver_, pacer)),
      memory_(driver_, static_cast<uint64_t>(num_pieces) * kRequestBytes + kPageBytes) {
  auto* gates = reinterpret_cast<uint64_t*>(memory_.data() + static_cast<uint64_t>(num_pieces) * kRequestBytes);
  for (uint64_t i = 0; i < static_cast<uint64_t>(num_pieces); ++i) {
    gates[i] = 0;
    pieces_.push_back(std::make_unique<Piece>(memory_.data() + i * kRequestBytes, gates + i));
  }
}

// As in StagedMover.
GatedMover::~GatedMover() { memory_.fill(0, memory_.nbytes(), std::byte{0}); }

void GatedMover::issue(const TransferPointer& transfer) noexcept {
  Request end{.is_end = true};
  try {
    queue(*transfer);
  } catch (const std::exception& error) {
    transfer->fail(error);
    end.is_cut_short = true;
    if (last_queued_mark_ != num_marks_) marks_->skip(num_marks_);
  }
  try {
    // Also of a transfer that was cut short: behind it the device touches its memory no more.
    transfer->done->record(stream_.handle());
    if (!end.is_cut_short) transfer->set_issued();
  } catch (const std::exception& error) {
    transfer->fail(error);
    // No event tells when the copies end, so they are waited for here: the lane's thread, which is told of the end
    // behind that, may not wait for the stream, as it opens the gates of what others queue meanwhile.
    stream_.drain();
    end.is_cut_short = false;
  }
  tell(end);
}

void GatedMover::queue(Transfer& transfer) {
  const bool is_in = transfer.direction == Direction::kIn;
  // Upkeep's thread calls the driver, so no gate may depend on it: the host waits.
  for (const TransferPointer& fence : transfer.fences) {
    if (fence->direction == Direction::kAudit || fence->direction == Direction::kFill) fence->wait_landed();
  }
  // `ready` protects the device memory, as in CopyMover; the others' order is that of the gates, told to the device.
  transfer.make_wait_ready(stream_.handle());
  for (const TransferPointer& fence : transfer.fences) {
    if (!fence->is_failing()) fence->done->make_wait(stream_.handle());
  }
  transfer.mark_start(stream_.handle());
  if (link_) link_->begin(transfer);
  queue_mark(announce({}));
  for (uint64_t begin = 0; begin < transfer.block.nbytes; begin += kRequestBytes) {
    Piece& piece = *pieces_[num_requests_++ % pieces_.size()];
    const uint64_t use = piece.num_uses++, nbytes = std::min(kRequestBytes, transfer.block.nbytes - begin);
    const uint64_t mark = announce({.piece = &piece, .use = use, .begin = begin, .nbytes = nbytes});
    // The gate protects the piece's bytes: what is to be copied in may not be read yet, or what was copied out last
    // may not be written yet.
    driver_->wait_value(stream_.handle(), piece.gate, use + (is_in ? 1 : 0));
    if (is_in) {
      driver_->copy_in(transfer.device + begin, piece.data, nbytes, stream_.handle());
    } else {
      driver_->copy_out(piece.data, transfer.device + begin, nbytes, stream_.handle());
    }
    queue_mark(mark);
  }
  if (link_) link_->end(stream_.handle());
}

uint64_t GatedMover::announce(Request request) {
  request.mark = ++num_marks_;
  tell(request);
  return request.mark;
}

void GatedMover::queue_mark(uint64_t number) {
  driver_->call_back(stream_.handle(), [marks = marks_, number](int code) { marks->pass(number, code); });
  last_queued_mark_ = number;
}

void GatedMover::tell(const Request& request) {
  const std::lock_guard lock(mutex_);
  requests_.push_back(request);
  changed_.notify_all();
}

GatedMover::Request GatedMover::hear() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !requests_.empty(); });
  const Request request = requests_.front();
  requests_.pop_front();
  return request;
}

void GatedMover::serve(const TransferPointer& transfer) noexcept {
  Request request = hear();
  for (; !request.is_end; request = hear()) serve(transfer, request);
  if (!request.is_cut_short) return;
  try {
    transfer->done->synchronize();
  } catch (const Error&) {
    return;  // the error that is told is the first
  }
}

void GatedMover::serve(const TransferPointer& transfer, const Request& request) {
  const bool is_in = transfer->direction == Direction::kIn;
  if (request.piece == nullptr) {
    // Requests never occupy the I/O threads while the device computes.
    if (!marks_->await(request.mark)) transfer->fail(marks_->error_text());
    return;
  }
  Piece& piece = *request.piece;
  piece.window.enter();  // the host is done with what the piece held
  // The mark protects the piece's bytes: the device may still read those that it had before, or still write these.
  if (!marks_->await(is_in ? piece.last_mark : request.mark)) transfer->fail(marks_->error_text());
  piece.last_mark = request.mark;
  if (transfer->is_failing()) {
    open_gate(*transfer, request);
    piece.window.leave();
    return;
  }
  transfer->begin_part();
  pool_.submit([this, transfer, request](Bounce bounce) {
    try {
      run(*transfer, request, bounce);
    } catch (const std::exception& error) {
      transfer->fail(error);
    }
    open_gate(*transfer, request);
    if (transfer->finish_part()) complete(transfer);
    request.piece->window.leave();
  });
}

void GatedMover::run(Transfer& transfer, const Request& request, Bounce bounce) {
  auto& storage = static_cast<IoStorage&>(*transfer.block.storage);
  const uint64_t offset = transfer.block.offset + request.begin;
  if (transfer.direction == Direction::kOut) {
    transfer.note(request.begin, request.piece->data, request.nbytes);
    storage.write(offset, request.piece->data, request.nbytes, bounce);
  } else {
    storage.read(offset, request.piece->data, request.nbytes, bounce);
    transfer.compare(request.begin, request.piece->data, request.nbytes);
  }
}

void GatedMover::open_gate(Transfer& transfer, const Request& request) {
  if (transfer.direction == Direction::kIn && transfer.is_failing()) {
    std::memset(request.piece->data, 0, request.nbytes);
  }
  std::atomic_ref<uint64_t>(*request.piece->gate).store(request.use + 1, std::memory_order_release);
}

// A device that is lost may call back nobody any more, and the lane's thread would wait for ever. It is asked here, as
// nobody else calls the driver now: whoever calls may be held up until gates are opened, which the thread does.
void GatedMover::end() noexcept {
  try {
    stream_.synchronize();
  } catch (const Error& error) {
    marks_->fail(error.what());
  }
}

void GatedMover::drain() noexcept {
  for (const auto& piece : pieces_) piece->window.wait_until_empty();
  stream_.drain();
}

}  // namespace lmswap
