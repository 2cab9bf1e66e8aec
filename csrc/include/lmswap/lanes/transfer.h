/// @file
/// @brief One copy between device memory and a block of a tier.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lmswap/checksum.h"
#include "lmswap/driver/event.h"
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

/// @brief One copy, audit or fill, and the events and states that others wait for.
///
///   queued ──► issued ──► landed        issued: `done` is recorded, so a stream can wait for the device side
///      └──────────┴─────► failed        landed: no thread of the runtime has anything left to do for it
///
/// For copies by the device both are reached at once, and `done` is when the copy ends. A copy out to disk is issued
/// when its copies off the device are queued, and lands when the bytes are in the file.
///
/// The public members are written before the transfer is submitted to its lane; after that the lane's thread clears
/// `source` and `dependencies`, and an audit sets `checksums`. Functions are thread-safe, except `record_start` and
/// `add_predecessor`, which only the lane's backend calls, and `take_storage`, which needs the engine's lock.
/// `start_seconds` and `end_seconds` are read after the transfer has finished.
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

  Event ready;                        ///< on the caller's stream, when the transfer was queued
  const std::shared_ptr<Event> done;  ///< on the lane's stream; other transfers may begin behind it

  /// The copy out whose bytes this one reads, or the copy that it audits; the lane waits for it.
  std::shared_ptr<Transfer> source;
  bool is_ordered_after_source = false;  ///< `ready` is: the caller's stream has waited for the source
  /// Copies that may still access the block for its previous holders; the lane waits for them.
  std::vector<std::shared_ptr<Transfer>> dependencies;

  /// Checksums that a copy out computes and its copies in verify; null: not compared. Of an audit that has landed,
  /// those of the tier's bytes.
  std::shared_ptr<Checksums> checksums;
  std::byte filler{0};  ///< the value that a fill writes

  const std::shared_ptr<LinkStart> link_start = std::make_shared<LinkStart>();

  /// @brief Adds a part: a request on another thread. The lane itself is the first part.
  void begin_part();

  /// @brief Ends a part.
  /// @return whether it was the last
  bool finish_part();

  /// @brief Makes `settle` fail the transfer; the first error is kept.
  void fail(std::string_view text) noexcept;
  void fail(const std::exception& error) noexcept;
  [[nodiscard]] bool is_failing() const;

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

  void set_issued();

  /// @brief Ends the transfer: landed, or failed if any part failed.
  ///
  /// Unless it was issued, the device must no longer access its memory if it failed.
  void settle();

  /// @brief Removes the storage, of a transfer that has ended or that others run behind: its record may be taken much
  /// later, and must not keep the memory allocated until then.
  std::shared_ptr<Storage> take_storage() { return std::move(block.storage); }

  /// @brief Blocks until the bytes can be copied: `ready`, and `done` of the source, which has landed.
  /// @return since when
  /// @throws DriverError if the device has failed
  double wait_ready() const;

  /// @brief Makes `stream` wait for the same; a source that fails is not waited for.
  void queue_wait_ready(StreamHandle stream) const;

  /// @brief Blocks until the transfer has ended.
  /// @return false if it failed
  bool wait_landed() const;

  /// @brief Blocks until issued, and makes `stream` wait for `done`.
  /// @param arrival recorded when the stream reaches the wait
  /// @throws TransferError, BytesDiffer if the transfer failed
  void make_wait(StreamHandle stream, Event& arrival);

  /// @return whether it has landed and `stream` waited for it, so that work queued there from now on runs behind it.
  /// Makes no driver calls, like the two functions below.
  [[nodiscard]] bool precedes(StreamId stream) const;
  [[nodiscard]] bool was_waited_for() const;  ///< landed, and some stream has waited for it
  [[nodiscard]] bool has_landed() const;

  [[nodiscard]] bool is_device_free() const;  ///< the device memory is no longer accessed
  [[nodiscard]] bool is_finished() const;     ///< neither the device memory nor the block is accessed
  [[nodiscard]] bool has_failed() const;

  /// @throws TransferError, BytesDiffer if the transfer failed
  void check_not_failed() const;
  [[nodiscard]] std::string error_text() const;

  /// @return when a finished transfer that did not fail started or ended, seconds of CLOCK_MONOTONIC
  [[nodiscard]] double start_seconds() const;
  [[nodiscard]] double end_seconds() const;

 private:
  enum class State { kQueued, kIssued, kLanded, kFailed };
  [[nodiscard]] State state() const;
  void set_state(State state);

  const std::shared_ptr<Driver> driver_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  State state_ = State::kQueued;
  bool is_issued_ = false;  // `done` is when the device has finished with it, even if it fails
  int num_parts_ = 1;
  std::string error_;
  std::optional<uint64_t> changed_at_;  // offset of the first MiB that differs
  double landed_seconds_ = 0;
  std::optional<StreamId> waited_by_;                 // the last stream that was made to wait for it
  std::unique_ptr<Event> start_;                      // null: it starts behind `ready` and `predecessors_`
  std::vector<std::shared_ptr<Event>> predecessors_;  // what the lane's stream waited for
};

using TransferPointer = std::shared_ptr<Transfer>;

}  // namespace lmswap
