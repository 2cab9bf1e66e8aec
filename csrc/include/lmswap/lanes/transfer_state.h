/// @file
/// @brief How far a transfer has got.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "lmswap/driver/event.h"
#include "lmswap/error.h"

namespace lmswap {

/// @brief How far a transfer has got and its first error: what other transfers, streams and threads wait for.
///
///   queued ──► issued ──► landed        issued: `done` is recorded, so a stream can wait for the device side
///      └──────────┴─────► failed        landed: no thread of the runtime has anything left to do for it
///
/// For copies by the device both are reached at once, and `done` is when the copy ends. A copy out to disk is issued
/// when its copies off the device are queued, and lands when the bytes are in the file.
///
/// Thread-safe; `end_seconds` is read after the transfer has finished.
class TransferState {
 public:
  /// @throws DriverError if the event cannot be created
  explicit TransferState(const std::shared_ptr<Driver>& driver)
      : done(std::make_shared<Event>(driver)), driver_(driver) {}

  const std::shared_ptr<Event> done;  ///< on the lane's stream; other transfers may begin behind it

  /// @brief Adds a part: a request on another thread. The lane itself is the first part.
  void begin_part();

  /// @brief Ends a part.
  /// @return whether it was the last
  bool finish_part();

  /// @brief Makes `settle` fail the transfer; the first error is kept.
  void fail(std::string_view text) noexcept;
  void fail(const std::exception& error) noexcept;

  /// @brief The same for bytes that differ, which replaces other errors; of several, the first in the block is kept.
  void fail_checksum(const BytesDiffer& error);
  [[nodiscard]] bool is_failing() const;

  void set_issued();

  /// @brief Ends the transfer: landed, or failed if any part failed.
  ///
  /// Unless it was issued, the device must no longer access its memory if it failed.
  void settle();

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

  /// @return whether it has ended, and some stream has waited for it or some wait has thrown its error
  [[nodiscard]] bool is_known() const;

  [[nodiscard]] bool is_device_free() const;  ///< the device memory is no longer accessed
  [[nodiscard]] bool is_finished() const;     ///< neither the device memory nor the block is accessed
  [[nodiscard]] bool has_failed() const;

  /// @throws TransferError, BytesDiffer if the transfer failed
  void check_not_failed();
  [[nodiscard]] std::string error_text() const;

  /// @return when a finished transfer that did not fail ended, seconds of CLOCK_MONOTONIC
  [[nodiscard]] double end_seconds() const;

 private:
  enum class Stage { kQueued, kIssued, kLanded, kFailed };
  [[nodiscard]] Stage stage() const;
  void set_stage(Stage stage);

  const std::shared_ptr<Driver> driver_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  Stage stage_ = Stage::kQueued;
  bool is_issued_ = false;  // `done` is when the device has finished with it, even if it fails
  int num_parts_ = 1;
  std::string error_;
  std::optional<BytesDiffer> difference_;
  double landed_seconds_ = 0;
  std::optional<StreamId> waited_by_;  // the last stream that was made to wait for it
  bool has_thrown_ = false;
};

}  // namespace lmswap
