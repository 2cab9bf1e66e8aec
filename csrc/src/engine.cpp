#include "lmswap/engine.h"

#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "lmswap/clock.h"
#include "lmswap/error.h"
#include "lmswap/lanes/maintenance_backend.h"
#include "lmswap/tiers/compressed_tier.h"
#include "lmswap/tiers/disk_tier.h"
#include "lmswap/tiers/memory_tier.h"

namespace lmswap {
namespace {

// Of DLPack.
constexpr int32_t kDlCpu = 1, kDlCuda = 2;
constexpr uint8_t kDlInt = 0, kDlUnsigned = 1;

template <typename T>
void leak(T& held) {
  static_cast<void>(new T(std::move(held)));
}

void check_threads(int io_threads) {
  constexpr int kMaxThreads = 64;
  if (io_threads >= 1 && io_threads <= kMaxThreads) return;
  throw OptionError("io_threads is " + std::to_string(io_threads) + ", must be from 1 to " +
                    std::to_string(kMaxThreads));
}

// Checksums cover all bytes while they take at most a hundredth of the processor time; beyond that, a quarter of the
// bytes of copies of more than a MiB, a different quarter in each copy: a misdirected, lost or early request is
// detected at once, a byte that is always wrong within some steps. The I/O threads compute them, but where all cores
// compute, compute waits for them: within half of the peak, at 21.6 GB/s on a busy machine (AMD EPYC), all bytes of a
// 3D U-Net at 64^3 (0.69 GB in 1.93 s) cost 1.7 % of a step, of a GPT of 8 layers (0.86 GB in 2.8 s) 1.5 %.
constexpr double kShare = 0.01;
constexpr uint64_t kStride = 4;

double share_of_all_cores() { return kShare * std::max(1U, std::thread::hardware_concurrency()); }

}  // namespace

std::shared_ptr<Engine> Engine::open(std::shared_ptr<Driver> driver, std::shared_ptr<Faults> faults,
                                     BandwidthLimiters limiters, SafetyOptions options) {
  return std::shared_ptr<Engine>(new Engine(std::move(driver), std::move(faults), std::move(limiters), options));
}

Engine::Engine(std::shared_ptr<Driver> driver, std::shared_ptr<Faults> faults, BandwidthLimiters limiters,
               SafetyOptions options)
    : faults_(std::move(faults)),
      limiters_(std::move(limiters)),
      options_(options),
      process_(getpid()),
      checksum_budget_(std::make_shared<ChecksumBudget>(share_of_all_cores(), monotonic_seconds())),
      driver_(std::move(driver)) {
  if (options_.audits || options_.wipes)
    maintenance_lane_ = std::make_unique<Lane>(std::make_unique<MaintenanceBackend>(driver_), true);
}

Engine::~Engine() {
  close();
  if (getpid() == process_) return;
  // In a forked child there are no threads to join, the device must not be called, and any lock may be held by a thread
  // that does not exist there.
  leak(driver_), leak(tiers_), leak(maintenance_lane_), leak(handles_), leak(marks_), leak(hold_), leak(audits_);
  leak(unconfirmed_), leak(flights_);
}

void Engine::check_open() const {
  if (!is_open_) throw OptionError("the engine is closed");
}

const std::shared_ptr<Tier>& Engine::find_tier(const std::string& name) {
  check_open();
  const auto tier = tiers_.find(name);
  if (tier == tiers_.end()) throw OptionError("tier '" + name + "' is not open");
  return tier->second;
}

Engine::Handle& Engine::find_handle(int64_t handle) {
  check_open();
  const auto found = handles_.find(handle);
  if (found == handles_.end()) throw OptionError("handle " + std::to_string(handle) + " is unknown or given back");
  return found->second;
}

Engine::Handle& Engine::find_swapped(int64_t handle) {
  Handle& found = find_handle(handle);
  if (!found.is_host_copy) return found;
  throw OptionError("handle " + std::to_string(handle) + " is a host copy, which was not swapped out");
}

TransferPointer Engine::find_transfer(int64_t handle, int64_t number) {
  const std::vector<TransferPointer>& transfers = find_handle(handle).transfers;
  const auto found = std::find_if(transfers.begin(), transfers.end(),
                                  [&](const auto& transfer) { return transfer->number == number; });
  if (found != transfers.end()) return *found;
  throw OptionError("transfer " + std::to_string(number) + " is none of handle " + std::to_string(handle));
}

void Engine::add_tier(const std::string& name, const std::function<std::unique_ptr<Tier>()>& make) {
  const std::lock_guard lock(mutex_);
  check_open();
  if (tiers_.contains(name)) throw OptionError("tier '" + name + "' is open already");
  tiers_[name] = make();
  if (options_.wipes) tiers_[name]->wipe_slabs();
}

void Engine::open_host_tier(uint64_t limit_bytes) {
  add_tier("host",
           [&] { return std::make_unique<MemoryTier>(driver_, MemoryKind::kHost, driver_, limit_bytes, limiters_); });
}

void Engine::open_device_tier(uint64_t limit_bytes) {
  add_tier("device",
           [&] { return std::make_unique<MemoryTier>(driver_, MemoryKind::kDevice, driver_, limit_bytes, limiters_); });
}

void Engine::open_peer_tier(int device, uint64_t limit_bytes) {
  add_tier("peer", [&] {
    return std::make_unique<MemoryTier>(driver_, MemoryKind::kPeer, driver_->open_peer(device), limit_bytes, limiters_);
  });
}

void Engine::open_disk_tier(const std::string& directory, uint64_t limit_bytes, int io_threads) {
  check_threads(io_threads);
  add_tier("disk",
           [&] { return std::make_unique<DiskTier>(driver_, faults_, directory, limit_bytes, io_threads, limiters_); });
}

void Engine::open_compressed_tier(uint64_t limit_bytes, int io_threads) {
  check_threads(io_threads);
  add_tier("compressed",
           [&] { return std::make_unique<CompressedTier>(driver_, faults_, limit_bytes, io_threads, limiters_); });
}

void Engine::reserve(const std::string& tier, uint64_t nbytes, bool replace) {
  std::shared_ptr<Tier> kept;  // alive even if another thread closes the engine while storage is allocated
  std::unique_lock lock(mutex_);
  kept = find_tier(tier);
  kept->reserve(nbytes, replace, lock);
}

DLManagedTensor* Engine::out_start(int64_t swap, const std::string& tier_name, uint64_t offset, uint64_t pointer,
                                   uint64_t nbytes, StreamHandle stream) {
  if (pointer == 0 || nbytes == 0) throw OptionError("out_start needs a pointer and at least one byte");
  if (offset % kPageBytes != 0) {
    throw OptionError("offset " + std::to_string(offset) + " is not a multiple of the page, " +
                      std::to_string(kPageBytes) + " bytes");
  }
  auto token = std::make_unique<Token>();
  std::shared_ptr<Tier> tier;  // alive even if another thread closes the engine while storage is allocated
  std::unique_lock lock(mutex_);
  tier = find_tier(tier_name);
  const Block block = tier->take(offset, nbytes, lock);
  check_open();
  const int64_t handle = ++last_number_;
  handles_.emplace(handle, Handle{tier.get(), block, {}});
  try {
    launch(Direction::kOut, swap, handle, pointer, stream);
  } catch (...) {
    handles_.erase(handle);
    tier->release(block, {});
    throw;
  }
  token->engine = shared_from_this();
  token->handle = handle;
  token->shape = 1;
  void* const data = &token->handle;
  return give(std::move(token), data, {kDlCpu, 0}, {kDlInt, 64, 1});
}

DLManagedTensor* Engine::give(std::unique_ptr<Token> token, void* data, DLDevice device, DLDataType type) {
  token->tensor = {{data, device, 1, type, &token->shape, nullptr, 0}, token.get(), nullptr};
  token->tensor.deleter = [](DLManagedTensor* self) {
    const std::unique_ptr<Token> ended(static_cast<Token*>(self->manager_ctx));
    const bool is_forked = getpid() != ended->engine->process_;
    // Kernels of the caller access a host copy on streams that the engine does not know; of other blocks it knows all
    // copies. It waits here, not where a slab is freed: a released block may be overwritten before, a slab is sometimes
    // freed under the lock, and the device may wait for a lane's thread, but not for this one.
    if (ended->storage && !is_forked) ended->storage->wait_for_kernels();
    ended->engine->release(ended->handle);
    if (is_forked) leak(ended->storage);  // its memory is the parent's
  };
  return &token.release()->tensor;
}

std::vector<HostCopy> Engine::make_host_copies(const std::string& tier_name, const std::vector<uint64_t>& sizes) {
  if (sizes.empty() || std::ranges::find(sizes, 0U) != sizes.end()) {
    throw OptionError("make_host_copies needs sizes of at least one byte");
  }
  // Created before anything is allocated: nothing after that may fail.
  std::vector<std::unique_ptr<Token>> tokens(sizes.size());
  for (auto& token : tokens) token = std::make_unique<Token>();
  std::vector<HostCopy> copies;
  copies.reserve(sizes.size());
  std::shared_ptr<Tier> tier;  // alive even if another thread closes the engine while storage is allocated
  std::unique_lock lock(mutex_);
  tier = find_tier(tier_name);
  const bool is_host = driver_->device_is_host();
  if (!tier->is_addressable()) {
    throw TierError("tier '" + tier_name + "' keeps no bytes that the device can read in place, so it cannot hold " +
                    "weights: use tier='" + (is_host ? "disk" : "host") + "'");
  }
  const DLDevice device{is_host ? kDlCpu : kDlCuda, driver_->number()};
  std::vector<Block> blocks = tier->take_together(sizes, lock);
  check_open();
  for (size_t i = 0; i < sizes.size(); ++i) {
    Token& token = *tokens[i];
    token.engine = shared_from_this();
    token.handle = ++last_number_;
    token.shape = static_cast<int64_t>(sizes[i]);
    token.storage = blocks[i].storage;
    std::byte* const data = token.storage->data() + blocks[i].offset;
    handles_.emplace(token.handle, Handle{tier.get(), std::move(blocks[i]), {}, true});
    copies.push_back({token.handle, give(std::move(tokens[i]), data, device, {kDlUnsigned, 8, 1})});
  }
  return copies;
}

int64_t Engine::fill_host_copy(int64_t swap, int64_t handle, uint64_t pointer, StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  if (!find_handle(handle).is_host_copy) {
    throw OptionError("handle " + std::to_string(handle) + " is a swapped-out block, not a host copy");
  }
  if (pointer == 0) throw OptionError("fill_host_copy of handle " + std::to_string(handle) + " needs a pointer");
  return launch(Direction::kOut, swap, handle, pointer, stream)->number;
}

int64_t Engine::in_start(int64_t swap, int64_t handle, uint64_t pointer, uint64_t nbytes, StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  const uint64_t held = find_handle(handle).block.nbytes;
  // The target may be larger: a traced storage can be longer than the one that the operator allocated.
  if (pointer == 0 || nbytes < held) {
    throw OptionError("in_start of handle " + std::to_string(handle) + " needs a pointer and room for the " +
                      std::to_string(held) + " bytes that were swapped out, not " + std::to_string(nbytes));
  }
  return launch(Direction::kIn, swap, handle, pointer, stream)->number;
}

std::shared_ptr<Checksums> Engine::make_checksums(const Transfer& transfer) const {
  const uint64_t nbytes = transfer.block.nbytes;
  if (nbytes <= kChecksumBytes || checksum_budget_->is_left(transfer.queued_seconds)) {
    return std::make_shared<Checksums>(nbytes, 1, 0, checksum_budget_);
  }
  const auto mixed =
      static_cast<uint32_t>(transfer.number) * 0x9e3779b1;  // numbers may recur modulo 4 from step to step
  return std::make_shared<Checksums>(nbytes, kStride, (mixed >> 16) % kStride, checksum_budget_);
}

// A host copy lives for as long as its model, and is copied in every step.
void Engine::drop_known(Handle& handle) {
  std::erase_if(handle.transfers, [](const TransferPointer& transfer) {
    if (!transfer->state.is_known() || !transfer->state.is_finished()) return false;
    transfer->take_storage();
    return true;
  });
}

// Orders a copy of a host copy: copies in run beside each other, behind the last copy out; that one behind all.
void Engine::order(Transfer& transfer, const Handle& handle, StreamId waiting) {
  for (const TransferPointer& earlier : handle.transfers) {
    if (transfer.direction == Direction::kOut) {
      if (!earlier->state.precedes(waiting)) transfer.dependencies.push_back(earlier);
    } else if (earlier->direction == Direction::kOut) {
      transfer.source = earlier;
    }
  }
}

// Queues a copy on its lane, under the lock: everything that a transfer waits for is queued before it.
TransferPointer Engine::launch(Direction direction, int64_t swap, int64_t number, uint64_t pointer,
                               StreamHandle stream) {
  Handle& handle = handles_.at(number);
  auto transfer = std::make_shared<Transfer>(driver_, direction, ++last_number_, swap, pointer, handle.block);
  // Determined before `ready` is recorded, which is then behind everything that the stream has waited for.
  const StreamId waiting = driver_->stream_id(stream);
  if (handle.is_host_copy) {
    drop_known(handle);
    order(*transfer, handle, waiting);
  } else if (direction == Direction::kOut) {
    transfer->dependencies = handle.tier->dependencies(handle.block, waiting);
    // An audit verifies more, and finds out in which direction bytes were changed.
    if (!options_.audits) transfer->checksums = make_checksums(*transfer);
  } else {
    transfer->source = handle.transfers.front();
    transfer->checksums = transfer->source->checksums;
  }
  if (transfer->source) transfer->is_ordered_after_source = transfer->source->state.precedes(waiting);
  // `ready` protects the device memory at `pointer`: the backends make their lanes wait for it.
  transfer->ready.record(stream);
  // Created before anything is queued: nothing after that may fail.
  TransferPointer audit;
  if (options_.audits && !handle.is_host_copy) {
    audit = std::make_shared<Transfer>(driver_, Direction::kAudit, ++last_number_, swap, 0, handle.block);
    audit->source = transfer;
  }
  handle.transfers.push_back(transfer);
  flights_.emplace(transfer->number, Flight{transfer, number, nullptr});
  handle.tier->lane(direction).submit(transfer);
  if (audit) {
    handle.transfers.push_back(audit);
    audits_.emplace(transfer->number, audit);
    maintenance_lane_->submit(audit);
  }
  return transfer;
}

// Overwrites a block that is being released, behind its users; the fill becomes one of them.
void Engine::fill(const Handle& handle, std::vector<TransferPointer>& users) noexcept {
  constexpr std::byte kPoison{0xff};  // NaN in every floating-point type
  try {
    auto fill = std::make_shared<Transfer>(driver_, Direction::kFill, ++last_number_, 0, 0, handle.block);
    fill->filler = options_.audits ? kPoison : std::byte{0};
    fill->dependencies = users;
    users.push_back(fill);
    maintenance_lane_->submit(fill);
  } catch (const std::exception& error) {
    log_error("swapped bytes could not be overwritten: " + std::string(error.what()));
  }
}

void Engine::out_done(int64_t handle, StreamHandle stream) { wait_for(handle, out_transfer(handle), stream); }

void Engine::in_done(int64_t handle, int64_t transfer, StreamHandle stream) { wait_for(handle, transfer, stream); }

void Engine::confirm() {
  std::deque<TransferPointer> waited_for;
  {
    const std::lock_guard lock(mutex_);
    waited_for.swap(unconfirmed_);
  }
  for (const TransferPointer& transfer : waited_for) transfer->state.wait_landed();
  for (const TransferPointer& transfer : waited_for) transfer->state.check_not_failed();
}

void Engine::forget_unconfirmed() {
  std::deque<TransferPointer> waited_for;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  waited_for.swap(unconfirmed_);
}

int64_t Engine::out_transfer(int64_t handle) {
  const std::lock_guard lock(mutex_);
  return find_swapped(handle).transfers.front()->number;
}

uint64_t Engine::nbytes(int64_t handle) {
  const std::lock_guard lock(mutex_);
  return find_handle(handle).block.nbytes;
}

void Engine::wait_for(int64_t handle, int64_t number, StreamHandle stream) {
  TransferPointer transfer;
  std::shared_ptr<Driver> driver;  // a concurrent close removes `driver_`
  {
    const std::lock_guard lock(mutex_);
    transfer = find_transfer(handle, number);
    driver = driver_;
  }
  auto wait_start = std::make_shared<Event>(driver);
  // `done` protects the device memory: after a copy out it may be reused, after a copy in it holds the bytes.
  transfer->state.make_wait(stream, *wait_start);
  const std::lock_guard lock(mutex_);
  while (!unconfirmed_.empty() && unconfirmed_.front()->state.has_landed()) unconfirmed_.pop_front();
  if (transfer->direction == Direction::kIn && !transfer->state.has_landed()) unconfirmed_.push_back(transfer);
  const auto flight = flights_.find(number);
  if (flight == flights_.end() || flight->second.wait_start) return;
  flight->second.wait_start = std::move(wait_start);
  flight->second.waited_seconds = monotonic_seconds();
}

bool Engine::is_finished(int64_t number) {
  const std::lock_guard lock(mutex_);
  const auto flight = flights_.find(number);
  if (flight != flights_.end()) return flight->second.transfer->state.is_device_free();
  if (number > 0 && number <= last_number_) return true;
  throw OptionError("transfer " + std::to_string(number) + " is unknown");
}

bool Engine::is_idle() {
  const std::lock_guard lock(mutex_);
  return std::all_of(flights_.begin(), flights_.end(),
                     [](const auto& flight) { return flight.second.transfer->state.is_device_free(); });
}

std::vector<uint64_t> Engine::take_checksums(int64_t number) {
  TransferPointer audit;
  {
    const std::lock_guard lock(mutex_);
    const auto found = audits_.find(number);
    if (found == audits_.end()) {
      throw OptionError("transfer " + std::to_string(number) + " was not audited, or its sums were taken before");
    }
    audit = std::move(found->second);
    audits_.erase(found);
  }
  if (!audit->state.wait_landed()) throw TransferError(audit->state.error_text());
  return audit->checksums->sums();
}

std::vector<TransferRecord> Engine::take_records() {
  const std::lock_guard lock(mutex_);
  std::vector<TransferRecord> records;
  std::vector<int64_t> ended;  // removed only after all were read, since querying an event may throw
  for (const auto& [number, flight] : flights_) {
    const Transfer& transfer = *flight.transfer;
    if (!transfer.state.is_finished()) continue;
    if (transfer.state.has_failed()) {
      ended.push_back(number);  // its handle keeps the error for later waits
      continue;
    }
    const bool was_waited_for = flight.wait_start && flight.wait_start->is_finished();
    if (!was_waited_for && (flight.wait_start || handles_.contains(flight.handle))) continue;
    TransferRecord record{transfer.swap,
                          transfer.direction == Direction::kIn,
                          transfer.block.nbytes,
                          transfer.queued_seconds,
                          transfer.start_seconds(),
                          transfer.state.end_seconds()};
    if (was_waited_for) {
      record.wait_start_seconds = flight.wait_start->seconds();
      record.wait_end_seconds =
          std::max({record.wait_start_seconds, transfer.state.done->seconds(), flight.waited_seconds});
    }
    records.push_back(record);
    ended.push_back(number);
  }
  for (const int64_t number : ended) flights_.erase(number);
  std::sort(records.begin(), records.end(),
            [](const TransferRecord& a, const TransferRecord& b) { return a.end_seconds < b.end_seconds; });
  return records;
}

// A copy that was waited for needs no record; one that was not is kept until it has finished.
void Engine::forget_records(double stop_seconds) {
  const std::lock_guard lock(mutex_);
  std::erase_if(flights_, [&](const auto& entry) {
    const auto& [number, flight] = entry;
    if (flight.transfer->queued_seconds >= stop_seconds) return false;
    return flight.wait_start || (!handles_.contains(flight.handle) && flight.transfer->state.is_finished());
  });
}

int64_t Engine::mark(StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  check_open();
  auto event = std::make_unique<Event>(driver_);
  event->record(stream);
  marks_.emplace(++last_number_, std::move(event));
  return last_number_;
}

double Engine::take_mark(int64_t mark) {
  std::unique_ptr<Event> event;
  {
    const std::lock_guard lock(mutex_);
    const auto found = marks_.find(mark);
    if (found == marks_.end()) throw OptionError("mark " + std::to_string(mark) + " is unknown, or was taken before");
    event = std::move(found->second);
    marks_.erase(found);
  }
  event->synchronize();
  return event->seconds();
}

void Engine::forget_marks(const std::vector<int64_t>& marks) {
  const std::lock_guard lock(mutex_);
  for (const int64_t mark : marks) marks_.erase(mark);
}

bool Engine::can_hold() {
  const std::lock_guard lock(mutex_);
  check_open();
  return driver_->can_wait_for_host();
}

void Engine::hold(StreamHandle stream, double max_seconds) {
  const std::lock_guard lock(mutex_);
  check_open();
  if (!driver_->can_wait_for_host()) throw OptionError("streams of this device cannot wait for the host");
  if (!hold_) hold_ = std::make_unique<StreamHold>(driver_);
  hold_->begin(stream, max_seconds);
}

void Engine::let_go() {
  const std::lock_guard lock(mutex_);
  if (hold_) hold_->end();
}

void Engine::release(int64_t number) noexcept {
  if (getpid() != process_) return;
  Tier::Storages dropped;  // destroyed after the lock is released: freeing pinned memory is slow
  const std::lock_guard lock(mutex_);
  const auto handle = handles_.find(number);
  if (handle == handles_.end()) return;  // the engine was closed
  std::vector<TransferPointer> users = handle->second.transfers;
  for (const TransferPointer& user : users) {
    if (user->direction == Direction::kIn) audits_.erase(user->number);  // it can no longer be waited for
  }
  if (maintenance_lane_) fill(handle->second, users);
  dropped = handle->second.tier->release(handle->second.block, users);
  handles_.erase(handle);
}

TierStats Engine::tier_stats(const std::string& tier) {
  const std::lock_guard lock(mutex_);
  return find_tier(tier)->stats();
}

uint64_t Engine::live_handles() {
  const std::lock_guard lock(mutex_);
  return handles_.size();
}

void Engine::close() {
  if (getpid() != process_) return;
  // Destroyed after the lock is released, in this order from below: records and handles, then the lanes, which first
  // finish what was queued, then the driver.
  std::shared_ptr<Driver> driver;
  std::map<std::string, std::shared_ptr<Tier>> tiers;
  std::unique_ptr<Lane> maintenance;
  std::map<int64_t, Handle> handles;
  std::map<int64_t, Flight> flights;
  std::map<int64_t, std::unique_ptr<Event>> marks;
  std::map<int64_t, TransferPointer> audits;
  std::deque<TransferPointer> unconfirmed;
  std::unique_ptr<StreamHold> hold;
  const std::lock_guard lock(mutex_);
  is_open_ = false;
  hold.swap(hold_);
  driver.swap(driver_);
  tiers.swap(tiers_);
  maintenance.swap(maintenance_lane_);
  handles.swap(handles_);
  flights.swap(flights_);
  marks.swap(marks_);
  audits.swap(audits_);
  unconfirmed.swap(unconfirmed_);
}

}  // namespace lmswap
