/// @file
/// @brief The swapping engine of one device: tiers, copies and the handles of swapped-out blocks.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lmswap/dlpack.h"
#include "lmswap/lanes/bandwidth_limiter.h"
#include "lmswap/stream_hold.h"
#include "lmswap/tiers/tier.h"

namespace lmswap {

/// @brief A finished copy. Times are seconds of CLOCK_MONOTONIC.
struct TransferRecord {
  int64_t swap;  ///< as passed to `out_start` or `in_start`
  bool is_in;
  uint64_t nbytes;
  double queued_seconds, start_seconds, end_seconds;
  double wait_start_seconds = 0, wait_end_seconds = 0;  ///< when compute waited for it; both 0 if it did not
};

/// @brief A block whose bytes the caller reads and writes in place.
struct HostCopy {
  int64_t handle;
  DLManagedTensor* bytes;  ///< owned by the caller, who ends it by calling its deleter
};

/// @brief Optional handling of a tier's bytes besides copying them.
struct SafetyOptions {
  bool audits = false;  ///< compute checksums of the tier's bytes after each copy; fill released blocks with NaN
  bool wipes = false;   ///< overwrite released blocks and slabs with zeros
};

/// @brief Swaps blocks of device memory out to tiers and back in. Thread-safe.
///
/// `out_start` returns a token, a DLPack tensor of one int64 that holds the handle of the block. Deleting the token
/// releases the block: on any thread, without Python's lock, also after `close`. Copies of a released block may still
/// be running; copies of the block's next holder wait for them on their lane.
///
/// `make_host_copies` returns blocks that keep their bytes for as long as their tensor lives: the caller accesses them
/// in place, and swaps them in and out any number of times, but not while a copy of the same block accesses them, or
/// has yet to. As they may change at any time, nothing compares their bytes: they have no checksums, and no audits.
///
/// Everything that a copy waits for is queued before it, so lanes cannot deadlock. A forked child has neither the
/// threads nor the device: there, releasing, closing and destroying an engine do nothing. It cannot access host copies
/// in pinned memory of CUDA; those of the tier "disk" it shares with its parent, which sees what it writes, until the
/// parent has freed them.
///
/// Functions throw OptionError if a tier, handle, transfer or mark is unknown, or if the engine is closed where it must
/// be open, and DriverError if a driver call fails.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  /// @brief Opens an engine without tiers.
  /// @param faults faults of disk and compressed memory, for tests
  /// @param limiters bandwidth of the emulated link, if there is one
  /// @throws TierError if the system refuses the maintenance thread
  static std::shared_ptr<Engine> open(std::shared_ptr<Driver> driver, std::shared_ptr<Faults> faults,
                                      BandwidthLimiters limiters, SafetyOptions options = {});
  ~Engine();

  /// @brief Opens the tier "host": pinned host memory.
  /// @param limit_bytes the most that the tier may reserve, as in the functions below
  /// @throws OptionError if it is open already, as in the functions below
  void open_host_tier(uint64_t limit_bytes);

  /// @brief Opens the tier "device": spare memory of the same device, which emulates a host behind a faster link.
  void open_device_tier(uint64_t limit_bytes);

  /// @brief Opens the tier "peer": memory of another device, directly if the two have peer access, else through the
  /// host.
  /// @param device number of the other device
  /// @throws OptionError for the device of this engine
  void open_peer_tier(int device, uint64_t limit_bytes);

  /// @brief Opens the tier "disk": unnamed files. Space is checked by `reserve`.
  /// @param io_threads 1 to 64
  /// @throws OptionError if `io_threads` is out of range
  /// @throws TierError if the directory is missing, unwritable, not trusted, in memory (tmpfs, ramfs) or without direct
  /// I/O, or if threads are refused
  void open_disk_tier(const std::string& directory, uint64_t limit_bytes, int io_threads);

  /// @brief Opens the tier "compressed": compressed host memory.
  /// @param limit_bytes counts uncompressed bytes; the memory they occupy is in `tier_stats`, and not limited
  /// @param io_threads 1 to 64
  /// @throws OptionError if `io_threads` is out of range
  /// @throws TierError if threads are refused
  void open_compressed_tier(uint64_t limit_bytes, int io_threads);

  /// @brief Reserves one contiguous slab of at least `nbytes`. The engine stays usable by other threads meanwhile.
  ///
  /// Pinned memory grows in place.
  /// @param replace reserve a new slab even if the present one is large enough; that one is freed with its last block
  /// @throws TierError if the limit or the system forbids it; the tier has the same capacity as before, unless the
  /// error says that this cannot be reserved again
  void reserve(const std::string& tier, uint64_t nbytes, bool replace = false);

  /// @brief Queues a copy out, behind what `stream` holds now.
  /// @param swap number of the swap, for records and errors
  /// @param offset planned offset in the slab, a multiple of the page; if it is still occupied (two forwards before a
  /// backward), another one is used
  /// @param pointer device memory, which must stay allocated until `is_finished`
  /// @return the token, owned by the caller, who ends it by calling its deleter
  /// @throws OptionError if an argument is invalid
  /// @throws TierError if the tier has no room
  DLManagedTensor* out_start(int64_t swap, const std::string& tier, uint64_t offset, uint64_t pointer, uint64_t nbytes,
                             StreamHandle stream);

  /// @brief Allocates host copies, page-aligned in slabs of their own, which are as large as they are. A slab is freed
  /// with the last of them, and is one registration of CUDA's: copies of torch may be of a whole tensor.
  ///
  /// Deleting a tensor first blocks until all that is queued on the device has finished, as kernels on any stream may
  /// access it, then releases the handle, as with tokens. One that outlives the engine keeps the slab and
  /// the driver; its deleter then frees the slab, and wipes it if the engine would.
  /// @param tier "host", or "disk" on the host driver, where an error of the disk may raise SIGBUS in place
  /// @param sizes of at least a byte each
  /// @return for each size a handle and a tensor of so many uint8, of the engine's device: their address is valid there
  /// @throws OptionError if `sizes` has no number, or a 0
  /// @throws TierError if the tier has no bytes that the device can access in place, at the address that the host has
  /// for them, or no room; nothing is allocated
  std::vector<HostCopy> make_host_copies(const std::string& tier, const std::vector<uint64_t>& sizes);

  /// @brief Queues a copy out into a host copy, behind what `stream` holds now and behind earlier copies of the handle.
  ///
  /// If it fails, the bytes are undefined; copies in of the handle fail too until a wait has thrown the error.
  /// @param pointer device memory of as many bytes, which must stay allocated until `is_finished`
  /// @return the number of the transfer, to be waited for by `in_done`
  /// @throws OptionError if the handle is none of a host copy
  int64_t fill_host_copy(int64_t swap, int64_t handle, uint64_t pointer, StreamHandle stream);

  /// @brief Makes `stream` (on the host driver, the caller) wait until the bytes have left the device memory.
  /// @throws OptionError if the handle is that of a host copy
  /// @throws TransferError if the copy out failed
  void out_done(int64_t handle, StreamHandle stream);

  /// @brief Queues a copy in, behind the (last) copy out of the same handle and behind what `stream` holds now.
  /// @param nbytes room at `pointer`, at least as much as was swapped out
  /// @return the number of the transfer
  /// @throws OptionError if there is too little room
  int64_t in_start(int64_t swap, int64_t handle, uint64_t pointer, uint64_t nbytes, StreamHandle stream);

  /// @brief Makes `stream` (on the host driver, the caller) wait until the bytes have arrived.
  ///
  /// Every wait for a failed transfer throws, until the token is deleted; from then on the handle is unknown. Where the
  /// device waits for the disk by itself, a transfer may fail after this call: see `confirm`.
  /// @param transfer a number that `in_start` or `fill_host_copy` returned for `handle`; one of a host copy is unknown
  /// once it has ended and was waited for, when the next copy of the handle is queued
  /// @throws TransferError if the copy failed; BytesDiffer if the disk or compressed memory returned other bytes than
  /// were written, unless the engine audits
  void in_done(int64_t handle, int64_t transfer, StreamHandle stream);

  /// @brief Blocks until the outcome of all transfers passed to `in_done` is known.
  ///
  /// Results computed from them are valid only afterwards: a failed copy in delivers zeros.
  /// @throws TransferError, BytesDiffer as `in_done`
  void confirm();

  /// @brief Excludes all transfers so far from `confirm`, because the results are discarded.
  void forget_unconfirmed();

  /// @return the number of the transfer that `out_start` queued
  /// @throws OptionError if the handle is that of a host copy
  int64_t out_transfer(int64_t handle);

  /// @return the size of the block
  uint64_t nbytes(int64_t handle);

  /// @return whether a transfer no longer accesses its device memory; also true after it failed
  bool is_finished(int64_t transfer);

  /// @return whether no transfer accesses device memory
  bool is_idle();

  /// @brief Returns and removes the checksums of the tier's bytes after a transfer; blocks until they are computed.
  /// @return one for each started MiB, see checksum.h
  /// @throws OptionError if the engine does not audit, or they were taken before
  /// @throws TransferError if the bytes could not be read
  std::vector<uint64_t> take_checksums(int64_t transfer);

  /// @brief Returns and removes the records of finished transfers, in the order of their end.
  ///
  /// To be called once per step, or `forget_records`: until then the engine keeps each transfer's events. A transfer
  /// that nothing has waited for is recorded once its token is deleted.
  std::vector<TransferRecord> take_records();

  /// @brief Drops the records of transfers queued before `stop_seconds` that were waited for, or that have finished and
  /// lost their token.
  void forget_records(double stop_seconds);

  /// @brief Records a mark behind what `stream` holds now.
  /// @return its number
  int64_t mark(StreamHandle stream);

  /// @brief Blocks until the stream has passed a mark, and removes the mark.
  /// @return when the stream passed it
  double take_mark(int64_t mark);

  /// @brief Removes marks; unknown numbers are ignored.
  void forget_marks(const std::vector<int64_t>& marks);

  /// @return whether streams of this device can wait for the host without blocking other streams
  bool can_hold();

  /// @brief Makes `stream` wait, before what is queued from now on, until `let_go` or for `max_seconds`.
  ///
  /// Ends the hold that is in force.
  /// @throws OptionError if `can_hold` is false
  void hold(StreamHandle stream, double max_seconds);

  /// @brief Ends the hold in force, if there is one.
  void let_go();

  TierStats tier_stats(const std::string& tier);

  /// @return the number of handles whose token or tensor exists
  uint64_t live_handles();

  /// @brief Waits for all copies and frees everything. Idempotent; tokens may outlive it.
  void close();

 private:
  // A swapped-out block, the copy out that fills it and the copies in that read it; or a host copy.
  struct Handle {
    Tier* tier;
    Block block;
    std::vector<TransferPointer> transfers;  // the copy out first; includes audits; of a host copy those still needed
    bool is_host_copy = false;
  };
  // A transfer to be recorded.
  struct Flight {
    TransferPointer transfer;
    int64_t handle;
    std::shared_ptr<Event> wait_start;  // when the caller's stream reached the wait for it
    double waited_seconds = 0;          // when the host had queued that wait
  };
  // Its deleter releases the handle.
  struct Token {
    std::shared_ptr<Engine> engine;
    int64_t handle;
    int64_t shape;
    DLManagedTensor tensor;
    std::shared_ptr<Storage> storage;  // of a host copy
  };

  Engine(std::shared_ptr<Driver> driver, std::shared_ptr<Faults> faults, BandwidthLimiters limiters,
         SafetyOptions options);
  void check_open() const;
  const std::shared_ptr<Tier>& find_tier(const std::string& name);
  Handle& find_handle(int64_t handle);
  Handle& find_swapped(int64_t handle);
  static DLManagedTensor* give(std::unique_ptr<Token> token, void* data, DLDevice device, DLDataType type);
  TransferPointer find_transfer(int64_t handle, int64_t number);
  void add_tier(const std::string& name, const std::function<std::unique_ptr<Tier>()>& make);
  TransferPointer launch(Direction direction, int64_t swap, int64_t handle, uint64_t pointer, StreamHandle stream);
  static void drop_known(Handle& handle);
  static void order(Transfer& transfer, const Handle& handle, StreamId waiting);
  [[nodiscard]] std::shared_ptr<Checksums> make_checksums(const Transfer& transfer) const;
  void fill(const Handle& handle, std::vector<TransferPointer>& users) noexcept;
  void wait_for(int64_t handle, int64_t number, StreamHandle stream);
  void release(int64_t handle) noexcept;

  const std::shared_ptr<Faults> faults_;
  const BandwidthLimiters limiters_;
  const SafetyOptions options_;
  const pid_t process_;  // that opened the engine; see the class about forked children
  const std::shared_ptr<ChecksumBudget> checksum_budget_;

  std::mutex mutex_;
  bool is_open_ = true;
  std::shared_ptr<Driver> driver_;
  int64_t last_number_ = 0;  // of handles and transfers
  std::map<std::string, std::shared_ptr<Tier>> tiers_;
  std::unique_ptr<Lane> maintenance_lane_;  // null if no safety option is set
  std::map<int64_t, Handle> handles_;
  std::map<int64_t, std::unique_ptr<Event>> marks_;
  std::unique_ptr<StreamHold> hold_;           // null until a stream is held
  std::map<int64_t, TransferPointer> audits_;  // by the number of the audited copy, until their checksums are taken
  std::deque<TransferPointer> unconfirmed_;  // copies in that a stream waits for and that may still fail, for `confirm`
  std::map<int64_t, Flight> flights_;        // by number, until they failed or their record was taken
};

}  // namespace lmswap
