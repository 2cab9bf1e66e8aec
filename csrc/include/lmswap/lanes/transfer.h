// One copy between device memory and a block of a tier, and what others may wait for.
//
//   queued ──► issued ──► landed        issued: `done` is recorded, so a stream can wait for the device side
//      └──────────┴─────► failed        landed: no thread of ours has anything left to do for it
//
// With the device's own copies both come at once, and `done` tells when it is over. A copy out to disk is issued when
// its copies off the device are queued, and lands when the bytes are in the file.
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

enum class Direction { kOut, kIn, kAudit, kFill };  // the last two leave the bytes where they are: upkeep_mover.h

// Bytes of a tier, held by a handle: [offset, offset + nbytes) of a storage.
struct Block {
  std::shared_ptr<Storage> storage;
  uint64_t offset = 0;
  uint64_t nbytes = 0;
};

// Since when an emulated link has been busy with a transfer. The link's thread may have only this of it in the end.
class LinkStart {
 public:
  void note(double seconds) {  // of each chunk; the first counts
    double none = 0;
    seconds_.compare_exchange_strong(none, seconds);
  }
  double seconds() const { return seconds_; }  // 0: on no such link

 private:
  std::atomic<double> seconds_ = 0;
};

class Transfer {
 public:
  Transfer(const std::shared_ptr<Driver>& driver, Direction direction, int64_t number, int64_t swap, uint64_t device,
           Block block);

  const Direction direction;
  const int64_t number;
  const int64_t swap;
  const uint64_t device;  // address of the device memory
  Block block;
  const double queued_seconds;

  Event ready;                        // on the caller's stream, when the transfer was queued
  const std::shared_ptr<Event> done;  // on the lane; others may begin behind it

  // What the lane waits for before it begins: the copy out that this one reads back, or the copy that it audits, and
  // copies of the block's previous holders that still read or write its bytes.
  std::shared_ptr<Transfer> source;
  bool is_behind_source = false;  // `ready` is: the caller's stream has waited for the source before
  std::vector<std::shared_ptr<Transfer>> fences;

  // Of a copy out, what it has taken, and of its copies in, what must arrive; none: that is not compared. Of an audit
  // that has landed, what is in the tier.
  std::shared_ptr<Checksums> checksums;
  std::byte filler{0};  // of a fill

  const std::shared_ptr<LinkStart> link_start = std::make_shared<LinkStart>();

  // The lane is one part; requests that run on other threads are more. True: this was the last.
  void begin_part();
  bool finish_part();

  // What settle will say; the first text is kept.
  void fail(std::string_view text) noexcept;
  void fail(const std::exception& error) noexcept;
  bool is_failing() const;

  // Of a part that is about to leave, and of one that has come back, which fails if it is another. Any thread may do it
  // through whose hands the bytes go: those of the disk's lanes. What a device copies by itself passes none.
  void note(uint64_t begin, const std::byte* bytes, uint64_t nbytes);
  void compare(uint64_t begin, const std::byte* bytes, uint64_t nbytes);

  // When the lane is at it: at an event of its own, or at the last of `ready` and those behind which it was queued.
  void mark_start(StreamHandle lane);
  void begin_behind(std::shared_ptr<Event> event) { behind_.push_back(std::move(event)); }

  void set_issued();
  // Landed, or failed if any part failed. Unless it was issued, the device no longer touches what failed.
  void settle();

  // Of a transfer that has ended, or that others run behind: its record may be taken much later, and must not keep
  // memory until then.
  std::shared_ptr<Storage> take_storage() { return std::move(block.storage); }

  // Blocks until the bytes are there to be copied: `ready`, and `done` of the source, which has landed. Says since
  // when.
  double wait_ready() const;
  void make_wait_ready(StreamHandle stream) const;  // the same by a stream; a source that fails is not waited for
  bool wait_landed() const;                         // blocks; false if it failed
  // Blocks until issued; throws Error(kTransfer) if it failed. `arrival` is recorded when the stream comes to the wait.
  void make_wait(StreamHandle stream, Event& arrival);

  // Without asking the device: that it has landed, and that whatever `stream` is given from now on runs behind it.
  bool precedes(StreamId stream) const;
  bool was_waited_for() const;  // landed, and some stream is behind it
  bool has_landed() const;

  bool is_device_free() const;  // the device memory is no longer touched
  bool is_finished() const;     // nor is the block
  bool has_failed() const;
  void check_not_failed() const;  // throws Error(kTransfer)
  std::string error_text() const;
  // Of a finished transfer that did not fail.
  double start_seconds() const;
  double end_seconds() const;

 private:
  enum class State { kQueued, kIssued, kLanded, kFailed };
  State state() const;
  void set_state(State state);

  const std::shared_ptr<Driver> driver_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  State state_ = State::kQueued;
  bool is_issued_ = false;  // `done` tells when the device is through with it, also if it fails
  int num_parts_ = 1;
  std::string error_;
  std::optional<uint64_t> changed_at_;  // the first MiB of those found
  double landed_seconds_ = 0;
  std::optional<StreamId> waited_by_;           // the last stream that was made to wait for it
  std::unique_ptr<Event> start_;                // of the lane until it is finished; none: the events of `behind_` tell
  std::vector<std::shared_ptr<Event>> behind_;  // what the lane was to do before it
};

using TransferPointer = std::shared_ptr<Transfer>;

}  // namespace lmswap
