#include "lmswap/lanes/gated_backend.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "lmswap/error.h"
#include "lmswap/tiers/arena.h"

namespace lmswap {

void StreamProgress::advance(uint64_t number, int code) {
  const std::lock_guard lock(mutex_);
  last_ = number;
  skipped_.erase(skipped_.begin(), skipped_.lower_bound(number));
  if (code != 0) error_ = "CUDA's error " + std::to_string(code);
  changed_.notify_all();
}

void StreamProgress::fail(const std::string& text) {
  const std::lock_guard lock(mutex_);
  error_ = text;
  changed_.notify_all();
}

void StreamProgress::skip(uint64_t number) {
  const std::lock_guard lock(mutex_);
  skipped_.insert(number);
  changed_.notify_all();
}

bool StreamProgress::wait_for(uint64_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return last_ >= number || skipped_.contains(number) || !error_.empty(); });
  return error_.empty();
}

std::string StreamProgress::error_text() const {
  const std::lock_guard lock(mutex_);
  return "the device failed while a copy waited for it: " + error_;
}

GatedBackend::GatedBackend(std::shared_ptr<Driver> driver, IoPool& pool, int num_buffers,
                           const BandwidthLimiter& limiter)
    : driver_(std::move(driver)),
      pool_(pool),
      stream_(driver_),
      link_(GatedLink::make(driver_, limiter)),
      memory_(driver_, static_cast<uint64_t>(num_buffers) * kRequestBytes + kPageBytes) {
  auto* gates = reinterpret_cast<uint64_t*>(memory_.data() + static_cast<uint64_t>(num_buffers) * kRequestBytes);
  for (uint64_t i = 0; i < static_cast<uint64_t>(num_buffers); ++i) {
    gates[i] = 0;
    buffers_.push_back(std::make_unique<BounceBuffer>(memory_.data() + i * kRequestBytes, gates + i));
  }
}

// As in StagedBackend.
GatedBackend::~GatedBackend() { memory_.fill(0, memory_.nbytes(), std::byte{0}); }

void GatedBackend::issue(const TransferPointer& transfer) noexcept {
  Request end{.is_end = true};
  try {
    queue(*transfer);
  } catch (const std::exception& error) {
    transfer->state.fail(error);
    end.is_truncated = true;
    if (last_queued_mark_ != num_marks_) progress_->skip(num_marks_);
  }
  try {
    // Also of a truncated transfer: behind `done` the device no longer accesses its memory.
    transfer->state.done->record(stream_.handle());
    if (!end.is_truncated) transfer->state.set_issued();
  } catch (const std::exception& error) {
    transfer->state.fail(error);
    // No event marks the end of the copies, so they are waited for here: the lane's thread, which gets the end request
    // after that, must not wait for the stream, because it opens the gates of what other threads queue meanwhile.
    stream_.drain();
    end.is_truncated = false;
  }
  push(end);
}

void GatedBackend::queue(Transfer& transfer) {
  const bool is_in = transfer.direction == Direction::kIn;
  // The maintenance thread calls the driver, so no gate may depend on it: the host waits.
  for (const TransferPointer& dependency : transfer.dependencies) {
    if (dependency->direction == Direction::kAudit || dependency->direction == Direction::kFill)
      dependency->state.wait_landed();
  }
  // `ready` protects the device memory, as in CopyBackend; the waits for the others make the order of the gates
  // explicit to the device.
  transfer.queue_wait_ready(stream_.handle());
  for (const TransferPointer& dependency : transfer.dependencies) {
    if (!dependency->state.is_failing()) dependency->state.done->make_wait(stream_.handle());
  }
  transfer.record_start(stream_.handle());
  if (link_) link_->begin(transfer);
  queue_mark(add_request({}));
  for (uint64_t begin = 0; begin < transfer.block.nbytes; begin += kRequestBytes) {
    BounceBuffer& buffer = *buffers_[num_requests_++ % buffers_.size()];
    const uint64_t use = buffer.num_uses++, nbytes = std::min(kRequestBytes, transfer.block.nbytes - begin);
    const uint64_t mark = add_request({.buffer = &buffer, .use = use, .begin = begin, .nbytes = nbytes});
    // The gate protects the buffer's bytes: those to be copied in may not have been read yet, or those copied out last
    // may not be written yet.
    driver_->wait_value(stream_.handle(), buffer.gate, use + (is_in ? 1 : 0));
    if (is_in) {
      driver_->copy_in(transfer.device + begin, buffer.data, nbytes, stream_.handle());
    } else {
      driver_->copy_out(buffer.data, transfer.device + begin, nbytes, stream_.handle());
    }
    queue_mark(mark);
  }
  if (link_) link_->end(stream_.handle());
}

uint64_t GatedBackend::add_request(Request request) {
  request.mark = ++num_marks_;
  push(request);
  return request.mark;
}

void GatedBackend::queue_mark(uint64_t number) {
  driver_->call_back(stream_.handle(), [progress = progress_, number](int code) { progress->advance(number, code); });
  last_queued_mark_ = number;
}

void GatedBackend::push(const Request& request) {
  const std::lock_guard lock(mutex_);
  requests_.push_back(request);
  changed_.notify_all();
}

GatedBackend::Request GatedBackend::pop() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !requests_.empty(); });
  const Request request = requests_.front();
  requests_.pop_front();
  return request;
}

void GatedBackend::serve(const TransferPointer& transfer) noexcept {
  Request request = pop();
  for (; !request.is_end; request = pop()) serve(transfer, request);
  if (!request.is_truncated) return;
  try {
    transfer->state.done->synchronize();
  } catch (const Error&) {
    return;  // the transfer keeps its first error
  }
}

void GatedBackend::serve(const TransferPointer& transfer, const Request& request) {
  const bool is_in = transfer->direction == Direction::kIn;
  if (request.buffer == nullptr) {
    // Requests never occupy the I/O threads while the device computes.
    if (!progress_->wait_for(request.mark)) transfer->state.fail(progress_->error_text());
    return;
  }
  BounceBuffer& buffer = *request.buffer;
  buffer.in_use.acquire();  // the host has finished the previous use
  // The mark protects the buffer's bytes: the device may still read the previous ones, or still write these.
  if (!progress_->wait_for(is_in ? buffer.last_mark : request.mark)) transfer->state.fail(progress_->error_text());
  buffer.last_mark = request.mark;
  if (transfer->state.is_failing()) {
    open_gate(*transfer, request);
    buffer.in_use.release();
    return;
  }
  transfer->state.begin_part();
  pool_.submit([this, transfer, request](Scratch scratch) {
    try {
      run(*transfer, request, scratch);
    } catch (const std::exception& error) {
      transfer->state.fail(error);
    }
    open_gate(*transfer, request);
    if (transfer->state.finish_part()) complete(transfer);
    request.buffer->in_use.release();
  });
}

void GatedBackend::run(Transfer& transfer, const Request& request, Scratch scratch) {
  auto& storage = static_cast<IoStorage&>(*transfer.block.storage);
  const uint64_t offset = transfer.block.offset + request.begin;
  if (transfer.direction == Direction::kOut) {
    transfer.record_checksums(request.begin, request.buffer->data, request.nbytes);
    storage.write(offset, request.buffer->data, request.nbytes, scratch);
  } else {
    storage.read(offset, request.buffer->data, request.nbytes, scratch);
    transfer.verify_checksums(request.begin, request.buffer->data, request.nbytes);
  }
}

void GatedBackend::open_gate(Transfer& transfer, const Request& request) {
  if (transfer.direction == Direction::kIn && transfer.state.is_failing()) {
    std::memset(request.buffer->data, 0, request.nbytes);
  }
  std::atomic_ref<uint64_t>(*request.buffer->gate).store(request.use + 1, std::memory_order_release);
}

// A lost device may make no more callbacks, and the lane's thread would wait forever. The stream is synchronized here,
// since no other thread calls the driver now: a caller may be blocked until gates are opened, which the thread does.
void GatedBackend::end() noexcept {
  try {
    stream_.synchronize();
  } catch (const Error& error) {
    progress_->fail(error.what());
  }
}

void GatedBackend::drain() noexcept {
  for (const auto& buffer : buffers_) buffer->in_use.wait_until_idle();
  stream_.drain();
}

}  // namespace lmswap
