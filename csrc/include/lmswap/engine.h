// Owner of the tiers of one device: hands out handles for what was swapped out, and queues the copies.
//
// A handle is held by its token, one int64 in a DLPack tensor. Deleting the token gives the block back, on any thread,
// without Python's lock, also after the engine was closed. The block's next holder waits, on its lane, for copies of
// the last one that are still under way.
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
#include "lmswap/lanes/pacer.h"
#include "lmswap/stream_hold.h"
#include "lmswap/tiers/tier.h"

namespace lmswap {

// One finished copy. A wait is what compute lost to it; both ends are 0 when nothing waited.
struct TransferRecord {
  int64_t swap;
  bool is_in;
  uint64_t nbytes;
  double queued_seconds, start_seconds, end_seconds;
  double wait_start_seconds = 0, wait_end_seconds = 0;
};

// What is done to the tiers' bytes beside moving them.
struct Upkeep {
  bool audits = false;  // after each copy the tier's bytes are summed; blocks given back are filled with NaN
  bool wipes = false;   // what is given back, blocks and whole slabs, is overwritten with zeros
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  static std::shared_ptr<Engine> open(std::shared_ptr<Driver> driver, std::shared_ptr<Faults> faults, Pacers pacers,
                                      Upkeep upkeep = {});
  ~Engine();

  void open_host_tier(uint64_t limit_bytes);
  void open_device_tier(uint64_t limit_bytes);
  void open_peer_tier(int device, uint64_t limit_bytes);
  void open_disk_tier(const std::string& directory, uint64_t limit_bytes, int io_threads);
  void open_compressed_tier(uint64_t limit_bytes, int io_threads);
  void reserve(const std::string& tier, uint64_t nbytes, bool anew = false);

  // The contract of these is in lmswap/execute/_C.pyi. The token is owned by the caller, who ends it by its deleter.
  DLManagedTensor* out_start(int64_t swap, const std::string& tier, uint64_t offset, uint64_t pointer, uint64_t nbytes,
                             StreamHandle stream);
  void out_done(int64_t handle, StreamHandle stream);
  int64_t in_start(int64_t swap, int64_t handle, uint64_t pointer, uint64_t nbytes, StreamHandle stream);
  void in_done(int64_t handle, int64_t transfer, StreamHandle stream);
  void confirm();
  void forget_unconfirmed();
  int64_t out_transfer(int64_t handle);
  uint64_t nbytes(int64_t handle);
  bool is_finished(int64_t transfer);
  bool is_idle();
  std::vector<uint64_t> take_checksums(int64_t transfer);
  std::vector<TransferRecord> take_records();
  void forget_records(double stop_seconds);
  int64_t mark(StreamHandle stream);
  double take_mark(int64_t mark);
  void forget_marks(const std::vector<int64_t>& marks);
  bool can_hold();
  void hold(StreamHandle stream, double most_seconds);
  void let_go();

  TierStats tier_stats(const std::string& tier);
  uint64_t live_handles();
  void close();

 private:
  // What was swapped out: the block, the copy that fills it and those that read it back.
  struct Handle {
    Tier* tier;
    Block block;
    std::vector<TransferPointer> transfers;  // the copy out first; audits too
  };
  // A transfer, when the caller's stream came to the wait for it, and when the host had made it wait.
  struct Flight {
    TransferPointer transfer;
    int64_t handle;
    std::shared_ptr<Event> wait_start;
    double waited_seconds = 0;
  };
  // Whose deleter gives the handle back.
  struct Token {
    std::shared_ptr<Engine> engine;
    int64_t handle;
    int64_t shape = 1;
    DLManagedTensor tensor;
  };

  Engine(std::shared_ptr<Driver> driver, std::shared_ptr<Faults> faults, Pacers pacers, Upkeep upkeep);
  void check_open() const;
  const std::shared_ptr<Tier>& find_tier(const std::string& name);
  Handle& find_handle(int64_t handle);
  TransferPointer find_transfer(int64_t handle, int64_t number);
  void add_tier(const std::string& name, const std::function<std::unique_ptr<Tier>()>& make);
  TransferPointer launch(Direction direction, int64_t swap, int64_t handle, uint64_t pointer, StreamHandle stream);
  std::shared_ptr<Checksums> make_checksums(const Transfer& transfer) const;
  void fill(const Handle& handle, std::vector<TransferPointer>& users) noexcept;
  void wait_for(int64_t handle, int64_t number, StreamHandle stream);
  void release(int64_t handle) noexcept;

  const std::shared_ptr<Faults> faults_;
  const Pacers pacers_;
  const Upkeep upkeep_;
  const pid_t process_;  // a forked child has neither the threads nor the device: it leaves everything alone
  const std::shared_ptr<SumBudget> sum_budget_;

  std::mutex mutex_;
  bool is_open_ = true;
  std::shared_ptr<Driver> driver_;
  int64_t last_number_ = 0;  // of handles and transfers
  std::map<std::string, std::shared_ptr<Tier>> tiers_;
  std::unique_ptr<Lane> upkeep_lane_;  // none where nothing is to be done
  std::map<int64_t, Handle> handles_;
  std::map<int64_t, std::unique_ptr<Event>> marks_;
  std::unique_ptr<StreamHold> hold_;           // none until a stream is held
  std::map<int64_t, TransferPointer> audits_;  // by the copy that they are of, until their sums are taken
  std::deque<TransferPointer> unconfirmed_;    // copies in that a stream waits for and that may still fail
  std::map<int64_t, Flight> flights_;          // until they failed, or were waited for and taken as records
};

}  // namespace lmswap
