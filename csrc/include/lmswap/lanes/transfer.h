/// @file
/// @brief One copy between device memory and a block of a tier.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lmswap/checksum.h"
#include "lmswap/driver/event.h"
#include "lmswap/lanes/transfer_state.h"
#include "lmswap/tiers/storage.h"

namespace lmswap {

/// @brief What a transfer does; an audit and a fill leave the bytes in the tier (maintenance_backend.h).
enum class Direction { kOut, kIn, kAudit, kFill };

/// @brief Bytes of a tier that a handle holds: [offset, offset + nbytes) of a storage.
struct Block {
  std::shared_ptr<Storage> storage;
  uint64_t offset = 0;
  uint64_t nbytes = 0;
};

/// @brief When an emulated link began to move a transfer. Thread-safe.
///
/// Separate from the transfer, because the link's thread must not be the last owner of anything else.
class LinkStart {
 public:
  /// @brief Called for each chunk; the first one counts.
  void record(double seconds) {
    double none = 0;
    seconds_.compare_exchange_strong(none, seconds);
  }

  /// @return seconds of CLOCK_MONOTONIC; 0 without an emulated link
  [[nodiscard]] double seconds() const { return seconds_; }

 private:
  std::atomic<double> seconds_ = 0;
};

/// @brief One copy, audit or fill: what is moved, what it waits for, and how far it has got.
///
/// The public members are written before the transfer is submitted to its lane; after that the lane's thread clears
/// `source` and `dependencies`, an audit sets `checksums`, and any thread may use `state`. Of the functions, only the
/// lane's backend calls `record_start` and `add_predecessor`, `take_storage` needs the engine's lock, and
/// `start_seconds` is read after the transfer has finished; the others are thread-safe.
class Transfer {
 public:
  /// @param number unique in the engine
  /// @param swap number of the swap, for records and errors
  /// @param device address of the device memory
  /// @throws DriverError if the events cannot be created
  Transfer(const std::shared_ptr<Driver>& driver, Direction direction, int64_t number, int64_t swap, uint64_t device,
           Block block);

  const Direction direction;
  const int64_t number;
  const int64_t swap;
  const uint64_t device;
  Block block;
  const double queued_seconds;

  Event ready;  ///< on the caller's stream, when the transfer was queued
  TransferState state;

  /// The copy out whose bytes this one reads, or the copy that it audits; the lane waits for it.
  std::shared_ptr<Transfer> source;
  bool is_ordered_after_source = false;  ///< `ready` is: the caller's stream has waited for the source
  /// Copies that may still access the block, for its previous holders or its own; the lane waits for them.
  std::vector<std::shared_ptr<Transfer>> dependencies;

  /// Checksums that a copy out computes and its copies in verify; null: not compared, as in host copies. Of an audit
  /// that has landed, those of the tier's bytes.
  std::shared_ptr<Checksums> checksums;
  std::byte filler{0};  ///< the value that a fill writes

  const std::shared_ptr<LinkStart> link_start = std::make_shared<LinkStart>();

  /// @brief Computes the checksums of a part before it is written to the tier.
  ///
  /// Called by any thread that handles the bytes: of the disk's lanes. Bytes that the device copies itself are not
  /// seen.
  void record_checksums(uint64_t begin, const std::byte* bytes, uint64_t nbytes);

  /// @brief Verifies the checksums of a part that was read from the tier; a difference fails the transfer.
  void verify_checksums(uint64_t begin, const std::byte* bytes, uint64_t nbytes);

  /// @brief Records the start of the transfer on the lane's stream.
  void record_start(StreamHandle lane);

  /// @brief Without `record_start`: the transfer starts when `ready` and all predecessors have happened.
  void add_predecessor(std::shared_ptr<Event> event) { predecessors_.push_back(std::move(event)); }

  /// @brief Removes the storage, of a transfer that has ended or that others run behind: its record may be taken much
  /// later, and must not keep the memory allocated until then.
  std::shared_ptr<Storage> take_storage() { return std::move(block.storage); }

  /// @brief Blocks until the bytes can be copied: `ready`, and `done` of the source, which has landed.
  /// @return since when
  /// @throws DriverError if the device has failed
  double wait_ready() const;

  /// @brief Makes `stream` wait for the same; a source that fails is not waited for.
  void queue_wait_ready(StreamHandle stream) const;

  /// @return when a finished transfer that did not fail started, seconds of CLOCK_MONOTONIC
  [[nodiscard]] double start_seconds() const;

 private:
  const std::shared_ptr<Driver> driver_;
  std::unique_ptr<Event> start_;                      // null: it starts behind `ready` and `predecessors_`
  std::vector<std::shared_ptr<Event>> predecessors_;  // what the lane's stream waited for
};

using TransferPointer = std::shared_ptr<Transfer>;

}  // namespace lmswap
