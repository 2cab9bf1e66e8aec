// Device <-> file through pieces of pinned memory. The device is given all copies of a transfer when it is queued, so
// that streams can wait for them from then on and the host goes on at once:
//
//   the stream   mark · gate, copy, mark · gate, copy, mark · ... · done
//   the host     in:  reads a piece when its last copy has passed its mark, and opens its gate
//                out: writes a piece when its copy has passed its mark, and opens its gate for the next one
//
// To CUDA such an order is invisible, and a wait can hold up other streams that share a queue of the hardware with it.
// Hence the rule of `Driver::wait_value`: a gate depends on nothing that the device was given later than its wait, and
// the threads that open gates call nothing of the driver's; they hear of each copy before it is queued. What fails
// opens its gates too: of a copy in that fails, zeros arrive, which are valid as whatever the bytes were (indices, for
// one), until `Engine::confirm` tells.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "lmswap/driver/stream.h"
#include "lmswap/lanes/gated_link.h"
#include "lmswap/lanes/mover.h"
#include "lmswap/lanes/window.h"
#include "lmswap/tiers/io_pool.h"

namespace lmswap {

// How far a stream has come, as the device calls back.
class Marks {
 public:
  void pass(uint64_t number, int code);  // in the order of numbers
  void skip(uint64_t number);            // it was not queued
  void fail(const std::string& text);    // the device has, and passes no more of them
  bool await(uint64_t number);           // blocks until it has passed or was skipped; false: the device has failed
  std::string error_text() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t last_ = 0;
  std::set<uint64_t> skipped_;
  std::string error_;
};

class GatedMover final : public Mover {
 public:
  GatedMover(std::shared_ptr<Driver> driver, IoPool& pool, int num_pieces, const Pacer& pacer);
  ~GatedMover() override;
  void issue(const TransferPointer& transfer) noexcept override;
  void move(const TransferPointer& transfer) override { serve(transfer); }
  void give_up(const TransferPointer& transfer) noexcept override { serve(transfer); }
  void complete(const TransferPointer& transfer) noexcept override { transfer->settle(); }
  void end() noexcept override;
  void drain() noexcept override;

 private:
  // The gate counts the uses of the piece that the host has ended. Uses are counted by who issues; the window and the
  // last mark are the lane's thread's.
  struct Piece {
    Piece(std::byte* memory, uint64_t* gate_) : data(memory), gate(gate_) {}
    std::byte* const data;
    uint64_t* const gate;
    uint64_t num_uses = 0;
    uint64_t last_mark = 0;
    Window window{1};
  };
  // Of a transfer: its begin, which has no piece; a copy for each piece; and its end.
  struct Request {
    Piece* piece = nullptr;
    uint64_t use = 0, begin = 0, nbytes = 0;
    uint64_t mark = 0;
    bool is_end = false;
    bool is_cut_short = false;  // at the end: not all was queued, and `done` tells when the device is through
  };

  void queue(Transfer& transfer);
  uint64_t announce(Request request);
  void queue_mark(uint64_t number);
  void tell(const Request& request);
  Request hear();
  void serve(const TransferPointer& transfer) noexcept;
  void serve(const TransferPointer& transfer, const Request& request);
  static void run(Transfer& transfer, const Request& request, Bounce bounce);
  static void open_gate(Transfer& transfer, const Request& request);

  std::shared_ptr<Driver> driver_;
  IoPool& pool_;
  Stream stream_;
  std::unique_ptr<GatedLink> link_;  // none where the lane is not paced
  PinnedMemory memory_;              // the pieces, and a page for the gates
  std::vector<std::unique_ptr<Piece>> pieces_;
  uint64_t num_requests_ = 0, num_marks_ = 0, last_queued_mark_ = 0;  // of who issues
  std::shared_ptr<Marks> marks_ = std::make_shared<Marks>();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> requests_;  // still to be served
};

}  // namespace lmswap
