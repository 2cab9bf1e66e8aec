// Swapping to disk where the device waits for the host: the host need not wait, whatever fails.
#include "lmswap/lanes/gated_backend.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>

#include "gated_swaps.h"
#include "lmswap/tiers/direct_file.h"

namespace lmswap::test::gated_backend_test {
namespace {

constexpr uint64_t kBytes = 5 * kRequestBytes + 17;  // more requests than bounce buffers

class GatedEngine : public test::GatedSwaps {
 protected:
  GatedEngine() : GatedSwaps("disk", kBytes) {}
  void open(const std::string& faults = "", bool can_wait = true, double max_delay_seconds = 0) {
    const char* kind = can_wait ? "emulated" : "emulated_one_queue";
    GatedSwaps::open(make_test_device(kind, faults, max_delay_seconds), BandwidthLimiters{});
    engine_->open_disk_tier(directory_.path(), 256 << 20, 1);
  }
};

TEST_F(GatedEngine, the_host_goes_on_while_neither_device_nor_disk_has_begun) {
  open();
  const Token token = there_and_back_while_held(3);
  engine_->confirm();
  EXPECT_EQ(arrived(), sent());
}

TEST_F(GatedEngine, bounce_buffers_are_used_again_only_when_device_and_disk_are_done_with_them) {
  open("write@*=jitter:0.01,read@*=jitter:0.001", true, 0.005);
  for (int i = 0; i < 3; ++i) {
    const Token token = out();
    in(token);
    engine_->confirm();
    EXPECT_EQ(arrived(), sent());
    forget_arrived();
  }
}

TEST_F(GatedEngine, a_read_that_fails_after_the_host_continued_is_reported_at_the_end_and_returns_zeros) {
  open("read@2=fail");
  const Token token = there_and_back_while_held();
  EXPECT_ERROR(engine_->confirm(), TransferError, "fail");
  const Bytes found = arrived(), sent = make_bytes(kBytes, 1);
  EXPECT_EQ(Bytes(found.begin(), found.begin() + kRequestBytes), Bytes(sent.begin(), sent.begin() + kRequestBytes));
  EXPECT_EQ(Bytes(found.begin() + kRequestBytes, found.end()), Bytes(kBytes - kRequestBytes));
  engine_->confirm();  // it is reported once
  in(token);
  engine_->confirm();
  EXPECT_EQ(arrived(), sent);
}

TEST_F(GatedEngine, a_write_that_fails_after_the_host_continued_is_reported_by_the_copy_in) {
  open("write@3=fail");
  Token token = there_and_back_while_held();
  EXPECT_ERROR(engine_->confirm(), TransferError, "never reached the tier");
  EXPECT_EQ(arrived(), Bytes(kBytes));
  token = out();
  in(token);
  engine_->confirm();
  EXPECT_EQ(arrived(), sent());
}

TEST_F(GatedEngine, a_failure_of_an_interrupted_step_is_not_reported_by_the_next) {
  open("read@1=fail");
  const Token token = there_and_back_while_held();
  engine_->forget_unconfirmed();
  in(token);
  engine_->confirm();
  EXPECT_EQ(arrived(), sent());
}

TEST_F(GatedEngine, the_memory_of_a_failed_copy_counts_as_used_until_the_device_is_through_with_it) {
  open("read@1=fail");
  const Token token = out();
  Held held(*device_);
  const int64_t transfer = engine_->in_start(1, token.handle(), target_, kBytes, device_->stream);
  EXPECT_FALSE(engine_->is_finished(transfer));
  held.let_go();
  while (!engine_->is_finished(transfer)) std::this_thread::yield();
  EXPECT_EQ(arrived(), Bytes(kBytes));
}

// An event that cannot be recorded proves nothing of what was queued before it, which runs all the same.
TEST_F(GatedEngine, the_memory_of_a_copy_whose_end_cannot_be_recorded_is_used_until_the_device_is_through_with_it) {
  open("", true, 0.02);
  emulated_gpu::Faults& faults = emulated_gpu::System::instance().faults;
  const Token token = out();
  for (const bool is_in : {true, false}) {
    const uint64_t memory = is_in ? target_ : source_;
    for (const uint64_t nth : {2, 3}) {  // the caller's event is the first, that of the begin the second
      faults.plan("cuEventRecord", nth, 999);
      Token other(nullptr);
      int64_t transfer = 0;
      if (is_in) {
        transfer = engine_->in_start(1, token.handle(), memory, kBytes, device_->stream);
        EXPECT_ERROR(engine_->in_done(token.handle(), transfer, device_->stream), TransferError, "999");
      } else {
        other = Token(engine_->out_start(1, "disk", 0, memory, kBytes, device_->stream));
        transfer = engine_->out_transfer(other.handle());
        EXPECT_ERROR(engine_->out_done(other.handle(), device_->stream), TransferError, "999");
      }
      EXPECT_EQ(faults.num_planned(), 0u);
      while (!engine_->is_finished(transfer)) std::this_thread::yield();
      device_->upload(memory, make_bytes(kBytes, is_in ? 2 : 1));  // as its next owner
      EXPECT_EQ(device_->violations(), std::vector<std::string>{}) << nth;
    }
  }
  in(token);
  engine_->confirm();
  EXPECT_EQ(arrived(), sent());
}

TEST_F(GatedEngine, records_are_kept_where_reading_one_of_them_fails) {
  open();
  const Token token = there_and_back(3);
  engine_->confirm();
  device_->driver->synchronize_stream(device_->stream);
  emulated_gpu::System::instance().faults.plan("cuEventElapsedTime", 7, 999);
  EXPECT_ERROR(engine_->take_records(), DriverError, "999");
  EXPECT_EQ(engine_->take_records().size(), 6u);
}

TEST_F(GatedEngine, full_and_shared_queues_do_not_deadlock) {
  open("write@*=jitter:0.003,read@*=jitter:0.003");
  there_and_back_whatever_the_queues();
}

TEST_F(GatedEngine, the_host_waits_if_all_streams_share_a_queue) {
  open("", false);
  EXPECT_FALSE(device_->driver->can_wait_for_host());
  const Token token = out();
  in(token);
  EXPECT_EQ(arrived(), sent());
}

TEST_F(GatedEngine, an_engine_that_closes_ends_what_was_queued) {
  open();
  close_while_held(1);
}

// Streams of which another one is known by the handle from some moment on, as a stream that was made where one was
// destroyed; and how often a stream was made to wait.
class ReusedHandles final : public test::ForwardingDriver {
 public:
  using ForwardingDriver::ForwardingDriver;
  StreamId stream_id(StreamHandle stream) override { return ForwardingDriver::stream_id(stream) + num_reused; }
  void wait_event(StreamHandle stream, EventHandle event, EventHandle arrival) override {
    ++num_waits;
    ForwardingDriver::wait_event(stream, event, arrival);
  }
  std::atomic<uint64_t> num_reused = 0;
  std::atomic<int> num_waits = 0;
};

TEST(Engine, a_stream_with_the_handle_of_one_before_it_is_behind_none_of_its_copies) {
  const auto device = make_test_device("emulated");
  const auto driver = std::make_shared<ReusedHandles>(device->driver);
  const auto engine = Engine::open(driver, device->faults, BandwidthLimiters{});
  engine->open_host_tier(1 << 20);
  const uint64_t pointer = device->allocate(kPageBytes);
  {
    Held held(*device);  // so that no copy ends, of which the next would have to know
    int num_waits[2] = {};
    for (const bool is_reused : {false, true}) {
      Token first(engine->out_start(1, "host", 0, pointer, kPageBytes, device->stream));
      engine->out_done(first.handle(), device->stream);
      first.reset();
      driver->num_reused += is_reused;
      driver->num_waits = 0;
      const Token second(engine->out_start(1, "host", 0, pointer, kPageBytes, device->stream));
      num_waits[is_reused] = driver->num_waits;
      engine->out_done(second.handle(), device->stream);
    }
    EXPECT_EQ(num_waits[false], 1) << "for what the stream was given before";
    EXPECT_GT(num_waits[true], 1) << "for the copy of the other stream, too";
  }
  engine->close();
  device->free(pointer);
  EXPECT_EQ(device->violations(), std::vector<std::string>{});
}

// A device that has fallen off the bus: it runs nothing more, makes no callbacks, and reports it only when queried.
class LostDriver final : public test::ForwardingDriver {
 public:
  using ForwardingDriver::ForwardingDriver;
  void record_event(EventHandle, StreamHandle) override {}
  void wait_event(StreamHandle, EventHandle, EventHandle) override {}
  bool query_event(EventHandle) override { throw lost("query_event"); }
  void synchronize_stream(StreamHandle) override { throw lost("synchronize_stream"); }
  void synchronize_event(EventHandle) override { throw lost("synchronize_event"); }
  void wait_value(StreamHandle, const uint64_t*, uint64_t) override {}
  void call_back(StreamHandle, std::function<void(int)>) override {}
  void copy_out(void*, uint64_t, uint64_t, StreamHandle) override {}
  void copy_in(uint64_t, const void*, uint64_t, StreamHandle) override {}

 private:
  static DriverError lost(const std::string& call) { return DriverError(call + " failed: the device is lost"); }
};

TEST(GatedBackend, closing_ends_copies_of_a_device_that_is_lost) {
  const test::TestDirectory directory;
  const auto device = make_test_device("emulated");
  const auto lost = std::make_shared<LostDriver>(device->driver);
  const Block block{std::make_shared<DirectFile>(directory.path(), kBytes, device->faults), 0, kBytes};
  const auto transfer = std::make_shared<Transfer>(lost, Direction::kOut, 1, 1, device->allocate(kBytes), block);
  auto closed = std::async(std::launch::async, [&] {
    IoPool pool(1);
    Lane lane(std::make_unique<GatedBackend>(lost, pool, 2, BandwidthLimiter()), true);
    lane.submit(transfer);
  });
  if (closed.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
    std::fputs("closing waits for ever\n", stderr);
    std::abort();
  }
  EXPECT_FALSE(transfer->state.wait_landed());
  EXPECT_NE(transfer->state.error_text().find("the device is lost"), std::string::npos) << transfer->state.error_text();
  device->free(transfer->device);
}

TEST(StreamProgress, a_skipped_mark_is_not_waited_for_and_affects_no_others) {
  StreamProgress progress;
  progress.skip(3);
  EXPECT_TRUE(progress.wait_for(3));
  auto waits = std::async(std::launch::async, [&] { return progress.wait_for(2); });
  EXPECT_EQ(waits.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  progress.advance(1, 0);
  progress.advance(2, 0);
  EXPECT_TRUE(waits.get());
  EXPECT_TRUE(progress.wait_for(3));
  progress.advance(4, 0);
  EXPECT_TRUE(progress.wait_for(3));
}

TEST(StreamProgress, a_device_that_failed_ends_all_waits) {
  StreamProgress progress;
  EXPECT_TRUE(progress.wait_for(0));
  auto waits = std::async(std::launch::async, [&] { return progress.wait_for(5); });
  progress.advance(1, 0);
  progress.advance(2, 719);
  EXPECT_FALSE(waits.get());
  EXPECT_FALSE(progress.wait_for(1));
  EXPECT_NE(progress.error_text().find("719"), std::string::npos);
}

}  // namespace
}  // namespace lmswap::test::gated_backend_test
