// Conformance suite of the engine, run on each driver, tier and pacing.
#include "lmswap/engine.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <thread>

#include "lmswap/clock.h"
#include "test_device.h"

namespace lmswap::test::engine_test {
namespace {

constexpr uint64_t kPage = kPageBytes, kMiB = 1 << 20;
constexpr double kSlowBytesPerSecond = 100e6;  // 4 MiB take 40 ms

struct Setup {
  std::string device, tier;
  bool is_paced;
};

std::vector<Setup> setups(const std::vector<bool>& pacings) {
  std::vector<Setup> setups;
  for (const std::string& device : test::test_device_kinds()) {
    for (const std::string& tier : test::tiers_of(device)) {
      for (const bool is_paced : pacings) setups.push_back({device, tier, is_paced});
    }
  }
  for (const std::string tier : {"host", "disk"}) {
    for (const bool is_paced : pacings) setups.push_back({"emulated_one_queue", tier, is_paced});
  }
  return setups;
}

class EngineConformance : public testing::TestWithParam<Setup> {
 protected:
  static constexpr uint64_t kLimit = 48 * kMiB;

  void SetUp() override { open(); }

  void TearDown() override {
    engine_->close();
    engine_.reset();
    for (const uint64_t pointer : allocated_) device_->free(pointer);
    EXPECT_EQ(device_->violations(), std::vector<std::string>{});
    EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
  }

  // A fresh device and engine, with these faults.
  void open(const std::string& faults = "") {
    if (engine_) engine_->close();
    engine_.reset();
    for (const uint64_t pointer : allocated_) device_->free(pointer);
    allocated_.clear();
    device_.reset();
    device_ = make_test_device(GetParam().device, faults);
    const double rate = GetParam().is_paced ? kSlowBytesPerSecond : 0;
    engine_ = Engine::open(device_->driver, device_->faults,
                           BandwidthLimiters{BandwidthLimiter(rate), BandwidthLimiter(rate)});
    open_tier();
  }

  void open_tier() { test::open_tier(*engine_, tier(), kLimit, directory_.path()); }

  std::string tier() const { return GetParam().tier; }
  bool is_staged() const { return test::is_io(tier()) && GetParam().device != "host"; }

  // The fault that makes the first copy that way fail; on the way in, after so many bytes went out.
  std::string failing(Direction direction, uint64_t out_bytes = 0) const {
    const bool is_out = direction == Direction::kOut;
    if (tier() == "device" || tier() == "peer") {  // both ways are one call
      const bool in_chunks = GetParam().is_paced && !device_->driver->can_wait_for_host();
      const uint64_t chunk_bytes = in_chunks ? BandwidthLimiter(kSlowBytesPerSecond).chunk_bytes() : out_bytes;
      const uint64_t num_out = is_out ? 0 : (out_bytes + chunk_bytes - 1) / chunk_bytes;
      return "copy_between@" + std::to_string(num_out + 1) + "=fail";
    }
    const std::string call = test::is_io(tier()) ? (is_out ? "write" : "read") : (is_out ? "copy_out" : "copy_in");
    return call + "@1=fail";
  }
  bool can_fail() const { return GetParam().device != "cuda" || test::is_io(tier()); }

  uint64_t allocate(uint64_t nbytes) { return allocated_.emplace_back(device_->allocate(nbytes)); }

  Token out(uint64_t pointer, uint64_t nbytes, uint64_t offset = 0, int64_t swap = 1) {
    return Token(engine_->out_start(swap, tier(), offset, pointer, nbytes, device_->stream));
  }
  Arrival in(const Token& token, uint64_t pointer, uint64_t nbytes, int64_t swap = 1) {
    return {token.handle(), engine_->in_start(swap, token.handle(), pointer, nbytes, device_->stream)};
  }
  void out_done(const Token& token) { engine_->out_done(token.handle(), device_->stream); }
  void in_done(const Arrival& arrival) {
    engine_->in_done(arrival.handle, arrival.transfer, device_->stream);
    engine_->confirm();
  }

  TestDirectory directory_;
  std::unique_ptr<TestDevice> device_;
  std::shared_ptr<Engine> engine_;
  std::vector<uint64_t> allocated_;
};

TEST_P(EngineConformance, restores_the_same_bytes_at_any_size) {
  engine_->reserve(tier(), 16 * kMiB);
  uint64_t seed = 0;
  for (const uint64_t nbytes : {uint64_t{1}, uint64_t{100}, kPage, kPage + 1, kMiB + 13, 4 * kMiB, 9 * kMiB + 777}) {
    for (const uint64_t shift : {0, 64}) {
      const auto bytes = make_bytes(nbytes, ++seed);
      const uint64_t pointer = allocate(shift + nbytes) + shift, target = allocate(shift + nbytes) + shift;
      device_->upload(pointer, bytes);
      const Token token = out(pointer, nbytes);
      out_done(token);
      device_->fill(pointer, nbytes, std::byte{0});
      in_done(in(token, target, nbytes));
      EXPECT_EQ(device_->download(target, nbytes), bytes) << nbytes << " bytes, shift " << shift;
    }
  }
}

TEST_P(EngineConformance, a_token_is_one_int64_with_the_handle) {
  const uint64_t pointer = allocate(kPage);
  const Token token = out(pointer, kPage);
  const DLTensor& tensor = token.tensor().dl_tensor;
  EXPECT_EQ(tensor.device.device_type, 1);
  EXPECT_EQ(tensor.ndim, 1);
  EXPECT_EQ(tensor.shape[0], 1);
  EXPECT_EQ(tensor.dtype.code, 0);
  EXPECT_EQ(tensor.dtype.bits, 64);
  EXPECT_GT(engine_->out_transfer(token.handle()), 0);
  out_done(token);
}

TEST_P(EngineConformance, a_copy_in_waits_for_its_own_copy_out) {
  constexpr uint64_t kBytes = 6 * kMiB;
  const uint64_t pointer = allocate(kBytes), target = allocate(kBytes);
  device_->upload(pointer, make_bytes(kBytes, 1));
  device_->fill(pointer, kBytes, std::byte{0x77});  // slow: the copy out begins late
  const Token token = out(pointer, kBytes);
  in_done(in(token, target, kBytes));
  EXPECT_EQ(device_->download(target, kBytes), test::Bytes(kBytes, std::byte{0x77}));
  out_done(token);
}

TEST_P(EngineConformance, a_copy_in_waits_for_kernels_that_still_use_its_target) {
  constexpr uint64_t kBytes = 5 * kMiB;
  const auto bytes = make_bytes(kBytes, 1), earlier = make_bytes(kBytes, 2);
  const uint64_t pointer = allocate(kBytes), target = allocate(kBytes), reader = allocate(kBytes);
  device_->upload(pointer, bytes);
  device_->upload(target, earlier);
  const Token token = out(pointer, kBytes);
  out_done(token);
  device_->copy(reader, target, kBytes);  // slow: reads what the target holds before the swap-in
  in_done(in(token, target, kBytes));
  EXPECT_EQ(device_->download(reader, kBytes), earlier);
  EXPECT_EQ(device_->download(target, kBytes), bytes);
}

TEST_P(EngineConformance, after_out_done_the_device_memory_may_be_overwritten) {
  constexpr uint64_t kBytes = 5 * kMiB;
  const auto bytes = make_bytes(kBytes, 1);
  const uint64_t pointer = allocate(kBytes);
  device_->upload(pointer, bytes);
  const Token token = out(pointer, kBytes);
  out_done(token);
  device_->fill(pointer, kBytes, std::byte{0xff});
  in_done(in(token, pointer, kBytes));
  EXPECT_EQ(device_->download(pointer, kBytes), bytes);
}

TEST_P(EngineConformance, a_block_is_not_overwritten_while_a_copy_still_reads_it) {
  constexpr uint64_t kBytes = 6 * kMiB;
  engine_->reserve(tier(), kBytes);
  const auto first = make_bytes(kBytes, 1), second = make_bytes(kBytes, 2);
  const uint64_t a = allocate(kBytes), b = allocate(kBytes), target = allocate(kBytes);
  device_->upload(a, first);
  device_->upload(b, second);
  Token token = out(a, kBytes);
  out_done(token);
  device_->fill(target, kBytes, std::byte{0});  // slow: the copy in begins late
  const Arrival arrival = in(token, target, kBytes);
  token.reset();
  const Token next = out(b, kBytes);
  EXPECT_EQ(engine_->tier_stats(tier()).capacity_bytes, kBytes) << "the place was not taken over";
  out_done(next);
  while (!engine_->is_finished(arrival.transfer)) std::this_thread::yield();
  EXPECT_EQ(device_->download(target, kBytes), first);
  in_done(in(next, a, kBytes));
  EXPECT_EQ(device_->download(a, kBytes), second);
}

TEST_P(EngineConformance, a_block_whose_token_died_at_once_still_keeps_its_bytes_apart) {
  constexpr uint64_t kBytes = 3 * kMiB;
  engine_->reserve(tier(), kBytes);
  const auto second = make_bytes(kBytes, 2);
  const uint64_t a = allocate(kBytes), b = allocate(kBytes);
  device_->upload(b, second);
  device_->fill(a, kBytes, std::byte{1});
  for (int i = 0; i < 3; ++i) out(a, kBytes);  // the token is gone before the copy has begun
  const Token token = out(b, kBytes);
  in_done(in(token, a, kBytes));
  EXPECT_EQ(device_->download(a, kBytes), second);
}

TEST_P(EngineConformance, a_handle_can_be_read_back_more_than_once) {
  constexpr uint64_t kBytes = 2 * kMiB;
  const auto bytes = make_bytes(kBytes, 1);
  const uint64_t pointer = allocate(kBytes), first = allocate(kBytes), second = allocate(kBytes);
  device_->upload(pointer, bytes);
  const Token token = out(pointer, kBytes);
  const Arrival arrival = in(token, first, kBytes), again = in(token, second, kBytes);
  in_done(again);
  in_done(arrival);
  out_done(token);
  EXPECT_EQ(device_->download(first, kBytes), bytes);
  EXPECT_EQ(device_->download(second, kBytes), bytes);
}

TEST_P(EngineConformance, an_occupied_planned_offset_is_replaced_by_another) {
  constexpr uint64_t kBytes = 2 * kMiB;
  engine_->reserve(tier(), kBytes);
  const uint64_t a = allocate(kBytes), b = allocate(kBytes);
  device_->upload(a, make_bytes(kBytes, 1));
  device_->upload(b, make_bytes(kBytes, 2));
  const Token first = out(a, kBytes);
  Token second = out(b, kBytes);
  out_done(first);
  out_done(second);
  in_done(in(first, b, kBytes));
  EXPECT_EQ(device_->download(b, kBytes), make_bytes(kBytes, 1));
  in_done(in(second, a, kBytes));
  EXPECT_EQ(device_->download(a, kBytes), make_bytes(kBytes, 2));
  EXPECT_EQ(engine_->tier_stats(tier()).used_bytes, 2 * kBytes);
  second.reset();
  const bool is_extended = tier() == "host" && device_->driver->host_memory_grows();
  EXPECT_EQ(engine_->tier_stats(tier()).capacity_bytes, is_extended ? kLimit : kBytes);
}

TEST_P(EngineConformance, many_swaps_run_beside_each_other) {
  constexpr uint64_t kBytes = kMiB + kPage;
  constexpr int kNum = 12;
  engine_->reserve(tier(), kNum * kBytes);
  std::vector<Token> tokens;
  std::vector<uint64_t> pointers;
  for (int i = 0; i < kNum; ++i) {
    pointers.push_back(allocate(kBytes));
    device_->upload(pointers.back(), make_bytes(kBytes, static_cast<uint64_t>(i)));
    tokens.push_back(out(pointers.back(), kBytes, static_cast<uint64_t>(i) * kBytes, i));
  }
  for (const Token& token : tokens) out_done(token);
  std::vector<Arrival> arrivals;
  for (int i = 0; i < kNum; ++i) {
    arrivals.push_back(in(tokens[static_cast<size_t>(kNum - 1 - i)], pointers[static_cast<size_t>(i)], kBytes));
  }
  for (int i = 0; i < kNum; ++i) {
    in_done(arrivals[static_cast<size_t>(i)]);
    EXPECT_EQ(device_->download(pointers[static_cast<size_t>(i)], kBytes),
              make_bytes(kBytes, static_cast<uint64_t>(kNum - 1 - i)));
  }
}

TEST_P(EngineConformance, transfers_of_a_lane_begin_in_the_order_of_queueing) {
  const uint64_t pointer = allocate(kMiB);
  device_->upload(pointer, make_bytes(kMiB, 1));
  std::vector<Token> tokens;
  for (int i = 0; i < 10; ++i) tokens.push_back(out(pointer, kMiB - static_cast<uint64_t>(i) * 10000, 0, i));
  for (const Token& token : tokens) out_done(token);
  device_->download(pointer, 1);
  while (!std::all_of(tokens.begin(), tokens.end(), [&](const Token& token) {
    return engine_->is_finished(engine_->out_transfer(token.handle()));
  })) {
    std::this_thread::yield();
  }
  std::vector<TransferRecord> records;
  while (records.size() < tokens.size()) {
    for (const TransferRecord& record : engine_->take_records()) records.push_back(record);
  }
  std::sort(records.begin(), records.end(), [](const auto& a, const auto& b) { return a.swap < b.swap; });
  for (size_t i = 1; i < records.size(); ++i) EXPECT_GE(records[i].start_seconds, records[i - 1].start_seconds);
}

TEST_P(EngineConformance, records_contain_each_transfer_once) {
  constexpr double kSlackSeconds = 0.5;  // the device's clock against ours
  constexpr uint64_t kBytes = 2 * kMiB;
  const uint64_t pointer = allocate(kBytes);
  device_->upload(pointer, make_bytes(kBytes, 1));
  {
    const Token token = out(pointer, kBytes, 0, 7);
    out_done(token);
    in_done(in(token, pointer, kBytes, 8));
    device_->download(pointer, kBytes);
  }
  std::vector<TransferRecord> records;
  while (records.size() < 2) {
    for (const TransferRecord& record : engine_->take_records()) records.push_back(record);
  }
  EXPECT_EQ(records[0].swap, 7);
  EXPECT_FALSE(records[0].is_in);
  EXPECT_EQ(records[1].swap, 8);
  EXPECT_TRUE(records[1].is_in);
  for (const TransferRecord& record : records) {
    EXPECT_EQ(record.nbytes, kBytes);
    EXPECT_LE(record.queued_seconds, record.start_seconds + kSlackSeconds);
    EXPECT_LE(record.start_seconds, record.end_seconds);
    EXPECT_GT(record.wait_start_seconds, record.queued_seconds - kSlackSeconds);
    EXPECT_GE(record.wait_end_seconds, record.wait_start_seconds);
  }
  EXPECT_TRUE(engine_->take_records().empty());
}

TEST_P(EngineConformance, a_transfer_that_was_not_waited_for_is_recorded_without_a_wait) {
  const uint64_t pointer = allocate(kPage);
  device_->upload(pointer, make_bytes(kPage, 1));
  out(pointer, kPage);
  std::vector<TransferRecord> records;
  while (records.empty()) records = engine_->take_records();
  EXPECT_EQ(records.front().wait_start_seconds, 0);
  EXPECT_EQ(records.front().wait_end_seconds, 0);
}

TEST_P(EngineConformance, forgets_the_records_of_a_time_but_not_of_who_is_still_to_wait) {
  constexpr uint64_t kBytes = 2 * kMiB;
  const uint64_t pointer = allocate(kBytes), other = allocate(kBytes);
  const Token forgotten = out(pointer, kBytes, 0, 1);
  out_done(forgotten);
  const Token awaited = out(other, kBytes, kBytes, 2);
  const double stop_seconds = monotonic_seconds();
  const Token later = out(pointer, kBytes, 2 * kBytes, 3);
  out_done(later);
  engine_->forget_records(stop_seconds);
  out_done(awaited);
  std::vector<int64_t> told;
  while (told.size() < 2) {
    for (const TransferRecord& record : engine_->take_records()) told.push_back(record.swap);
  }
  std::sort(told.begin(), told.end());
  EXPECT_EQ(told, (std::vector<int64_t>{2, 3}));
  EXPECT_TRUE(engine_->is_finished(engine_->out_transfer(forgotten.handle())));
  const int64_t mark = engine_->mark(device_->stream);
  engine_->forget_marks({mark});
  EXPECT_ERROR(engine_->take_mark(mark), OptionError, "unknown");
}

TEST_P(EngineConformance, marks_record_when_the_stream_passed_them) {
  const uint64_t pointer = allocate(kPage);
  const int64_t before = engine_->mark(device_->stream);
  device_->fill(pointer, kPage, std::byte{1});  // slow
  const int64_t after = engine_->mark(device_->stream);
  EXPECT_LE(engine_->take_mark(before), engine_->take_mark(after));
  EXPECT_EQ(device_->download(pointer, 1).front(), std::byte{1});
  EXPECT_ERROR(engine_->take_mark(after), OptionError, std::to_string(after));
  const int64_t left_behind = engine_->mark(device_->stream);
  engine_->close();
  EXPECT_ERROR(engine_->take_mark(left_behind), OptionError, "unknown");
  EXPECT_ERROR(engine_->mark(device_->stream), OptionError, "closed");
}

TEST_P(EngineConformance, a_held_stream_waits_until_it_is_let_go) {
  if (!engine_->can_hold()) GTEST_SKIP() << "its streams cannot wait for the host";
  constexpr double kForever = 600;
  engine_->hold(device_->stream, kForever);
  const int64_t first = engine_->mark(device_->stream);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const double let_go = monotonic_seconds();
  engine_->let_go();
  EXPECT_GE(engine_->take_mark(first), let_go - 1e-3);
  engine_->let_go();  // nothing is held
  engine_->hold(device_->stream, kForever);
  engine_->hold(device_->stream, kForever);  // ends the first
  const int64_t second = engine_->mark(device_->stream);
  engine_->let_go();
  EXPECT_GT(engine_->take_mark(second), let_go);
  engine_->hold(device_->stream, kForever);
  engine_->close();
  device_->driver->synchronize_stream(device_->stream);
  EXPECT_ERROR(engine_->hold(device_->stream, kForever), OptionError, "closed");
}

TEST_P(EngineConformance, a_held_stream_waits_no_longer_than_requested) {
  if (!engine_->can_hold()) {
    EXPECT_ERROR(engine_->hold(device_->stream, 1), OptionError, "cannot wait for the host");
    return;
  }
  const double before = monotonic_seconds();
  engine_->hold(device_->stream, 0.02);
  EXPECT_GE(engine_->take_mark(engine_->mark(device_->stream)) - before, 0.02);
}

TEST_P(EngineConformance, a_target_may_be_larger_than_what_was_swapped_out) {
  const uint64_t pointer = allocate(kPage), target = allocate(2 * kPage);
  const auto bytes = make_bytes(kPage, 1), earlier = make_bytes(2 * kPage, 2);
  device_->upload(pointer, bytes);
  device_->upload(target, earlier);
  const Token token = out(pointer, kPage);
  in_done(in(token, target, 2 * kPage));
  const auto found = device_->download(target, 2 * kPage);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), found.begin()));
  EXPECT_TRUE(std::equal(earlier.begin() + kPage, earlier.end(), found.begin() + kPage));
}

TEST_P(EngineConformance, two_hundred_steps_leave_all_use_flat) {
  constexpr uint64_t kBytes = 64 * 1024;
  constexpr int kNum = 4;
  engine_->reserve(tier(), kNum * kBytes);
  const uint64_t pointer = allocate(kBytes), target = allocate(kBytes);
  device_->upload(pointer, make_bytes(kBytes, 1));
  for (int step = 0; step < 200; ++step) {
    std::vector<Token> tokens;
    for (uint64_t i = 0; i < kNum; ++i) tokens.push_back(out(pointer, kBytes, i * kBytes));
    if (step % 10 == 3) continue;  // a step that an exception ended
    for (const Token& token : tokens) out_done(token);
    for (const Token& token : tokens) in_done(in(token, target, kBytes));
    engine_->take_records();
  }
  const TierStats stats = engine_->tier_stats(tier());
  EXPECT_EQ(stats.used_bytes, 0u);
  EXPECT_EQ(stats.capacity_bytes, kNum * kBytes);
  EXPECT_EQ(stats.peak_used_bytes, kNum * kBytes);
  EXPECT_EQ(engine_->live_handles(), 0u);
}

TEST_P(EngineConformance, a_failed_copy_out_is_reported_and_affects_nothing_else) {
  if (!can_fail()) GTEST_SKIP() << "this device does not fail on demand";
  constexpr uint64_t kBytes = 9 * kMiB;
  open(failing(Direction::kOut));
  const uint64_t pointer = allocate(kBytes), target = allocate(kBytes);
  device_->upload(pointer, make_bytes(kBytes, 1));
  {
    const Token broken = out(pointer, kBytes), whole = out(pointer, kBytes);
    const Arrival early = in(broken, target, kBytes);
    EXPECT_ERROR(in_done(early), TransferError, "fail");
    if (!is_staged()) {  // there the bytes have left the device, and only the file is missing them
      EXPECT_ERROR(out_done(broken), TransferError, "fail");
    }
    while (!engine_->is_finished(early.transfer)) std::this_thread::yield();
    EXPECT_ERROR(in_done(in(broken, target, kBytes)), TransferError, "never reached the tier");
    out_done(whole);
    in_done(in(whole, target, kBytes));
    EXPECT_EQ(device_->download(target, kBytes), make_bytes(kBytes, 1));
  }
  EXPECT_EQ(engine_->live_handles(), 0u);
  EXPECT_EQ(engine_->tier_stats(tier()).used_bytes, 0u);
}

TEST_P(EngineConformance, a_failed_copy_in_is_reported_and_can_be_retried) {
  if (!can_fail()) GTEST_SKIP() << "this device does not fail on demand";
  constexpr uint64_t kBytes = 9 * kMiB;
  open(failing(Direction::kIn, kBytes));
  const uint64_t pointer = allocate(kBytes), target = allocate(kBytes);
  device_->upload(pointer, make_bytes(kBytes, 1));
  const Token token = out(pointer, kBytes);
  out_done(token);
  EXPECT_ERROR(in_done(in(token, target, kBytes)), TransferError, "fail");
  in_done(in(token, target, kBytes));
  EXPECT_EQ(device_->download(target, kBytes), make_bytes(kBytes, 1));
}

TEST_P(EngineConformance, the_error_of_a_transfer_lives_for_as_long_as_its_token) {
  if (!can_fail()) GTEST_SKIP() << "this device does not fail on demand";
  open(failing(Direction::kIn, kPage));
  const uint64_t pointer = allocate(kPage);
  device_->upload(pointer, make_bytes(kPage, 1));
  Token token = out(pointer, kPage);
  const Arrival arrival = in(token, pointer, kPage);
  while (!engine_->is_finished(arrival.transfer)) std::this_thread::yield();
  for (int i = 0; i < 2; ++i) {
    engine_->take_records();
    EXPECT_ERROR(in_done(arrival), TransferError, "fail");
  }
  token.reset();
  EXPECT_ERROR(in_done(arrival), OptionError, "given back");
}

TEST_P(EngineConformance, a_full_tier_is_reported_before_anything_starts) {
  engine_->reserve(tier(), kPage);
  const uint64_t pointer = allocate(kPage);
  device_->upload(pointer, make_bytes(kPage, 1));
  EXPECT_ERROR(engine_->reserve(tier(), kLimit + 1), TierError, "limit");
  EXPECT_ERROR(out(pointer, kLimit + 1), TierError, "limit");
  EXPECT_EQ(engine_->live_handles(), 0u);
  const Token token = out(pointer, kPage);
  out_done(token);
  in_done(in(token, pointer, kPage));
  EXPECT_EQ(device_->download(pointer, kPage), make_bytes(kPage, 1));
}

TEST_P(EngineConformance, tokens_may_outlive_the_engine) {
  constexpr uint64_t kBytes = 2 * kMiB;
  const uint64_t pointer = allocate(kBytes);
  device_->upload(pointer, make_bytes(kBytes, 1));
  std::vector<Token> tokens;
  for (int i = 0; i < 3; ++i) tokens.push_back(out(pointer, kBytes));
  const std::weak_ptr<Engine> watched = engine_;
  engine_->close();
  engine_->close();
  EXPECT_EQ(engine_->live_handles(), 0u);
  EXPECT_EQ(device_->driver.use_count(), 1) << "a closed engine keeps the device";
  tokens.pop_back();
  std::thread([&] { tokens.clear(); }).join();
  open();
  EXPECT_TRUE(watched.expired());
}

TEST_P(EngineConformance, a_closed_engine_refuses_work) {
  const uint64_t pointer = allocate(kPage);
  const Token token = out(pointer, kPage);
  const int64_t transfer = engine_->out_transfer(token.handle());
  engine_->close();
  EXPECT_TRUE(engine_->is_finished(transfer));
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { out(pointer, kPage); }, [&] { in(token, pointer, kPage); }, [&] { out_done(token); },
           [&] { in_done({token.handle(), transfer}); }, [&] { engine_->reserve(tier(), kPage); },
           [&] { engine_->tier_stats(tier()); }, [&] { engine_->open_host_tier(kPage); }}) {
    EXPECT_ERROR(call(), OptionError, "closed");
  }
}

TEST_P(EngineConformance, refuses_arguments_that_cannot_be_used) {
  const uint64_t pointer = allocate(kPage);
  const Token token = out(pointer, kPage);
  EXPECT_ERROR(engine_->out_start(1, "tape", 0, pointer, kPage, 0), OptionError, "'tape' is not open");
  EXPECT_ERROR(out(pointer, kPage, 5), OptionError, "offset 5");
  EXPECT_ERROR(out(pointer, 0), OptionError, "byte");
  EXPECT_ERROR(out(0, kPage), OptionError, "pointer");
  EXPECT_ERROR(in(token, pointer, kPage - 1), OptionError, std::to_string(kPage));
  EXPECT_ERROR(engine_->in_start(1, 999, pointer, kPage, 0), OptionError, "999");
  EXPECT_ERROR(engine_->out_transfer(999), OptionError, "999");
  EXPECT_ERROR(in_done({999, 1}), OptionError, "999");
  EXPECT_ERROR(in_done({token.handle(), 999}), OptionError, "transfer 999");
  EXPECT_ERROR(engine_->is_finished(999), OptionError, "999");
  EXPECT_ERROR(open_tier(), OptionError, "open already");
  EXPECT_ERROR(engine_->open_disk_tier(directory_.path(), 1, 0), OptionError, "io_threads");
}

TEST_P(EngineConformance, works_on_the_default_stream) {
  constexpr uint64_t kBytes = kMiB;
  const uint64_t pointer = allocate(kBytes);
  device_->upload(pointer, make_bytes(kBytes, 1));
  const Token token(engine_->out_start(1, tier(), 0, pointer, kBytes, 0));
  engine_->out_done(token.handle(), 0);
  engine_->in_done(token.handle(), engine_->in_start(1, token.handle(), pointer, kBytes, 0), 0);
  device_->driver->synchronize_stream(0);
  EXPECT_EQ(device_->download(pointer, kBytes), make_bytes(kBytes, 1));
}

TEST_P(EngineConformance, a_forked_child_lets_go_without_harm) {
  const uint64_t pointer = allocate(kPage);
  std::vector<Token> tokens;
  tokens.push_back(out(pointer, kPage));
  while (!engine_->is_finished(engine_->out_transfer(tokens.front().handle()))) std::this_thread::yield();
  const int64_t mark = engine_->mark(device_->stream);
  if (engine_->can_hold()) engine_->hold(device_->stream, 0.001);
  const uint64_t num_idle_events = device_->driver->num_idle_events();
  const pid_t child = fork();
  if (child == 0) {
    tokens.clear();
    engine_.reset();
    _exit(device_->driver->num_idle_events() == num_idle_events ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(engine_->live_handles(), 1u);
  EXPECT_GT(engine_->take_mark(mark), 0);
}

class PacedEngine : public EngineConformance {};

TEST_P(PacedEngine, a_paced_lane_is_no_faster_than_its_pace) {
  constexpr uint64_t kBytes = 9 * kMiB;
  // A lower bound, which no machine is too slow for.
  constexpr double kLeastSeconds = (1 - 1e-6) * kBytes / kSlowBytesPerSecond;
  const uint64_t pointer = allocate(kBytes);
  device_->upload(pointer, make_bytes(kBytes, 1));
  {
    const Token token = out(pointer, kBytes);
    in_done(in(token, pointer, kBytes));
  }
  size_t num_records = 0;
  while (num_records < 2) {
    for (const TransferRecord& record : engine_->take_records()) {
      EXPECT_GE(record.end_seconds - record.start_seconds, kLeastSeconds);
      ++num_records;
    }
  }
}

std::string setup_name(const testing::TestParamInfo<Setup>& info) {
  return info.param.tier + "_on_" + info.param.device + (info.param.is_paced ? "_paced" : "");
}

INSTANTIATE_TEST_SUITE_P(Engines, EngineConformance, testing::ValuesIn(setups({false, true})), setup_name);
INSTANTIATE_TEST_SUITE_P(Engines, PacedEngine, testing::ValuesIn(setups({true})), setup_name);

// Does something in the middle of making room in the host tier.
class BusyDriver final : public test::ForwardingDriver {
 public:
  using ForwardingDriver::ForwardingDriver;
  void* allocate_host(uint64_t nbytes, uint64_t max_bytes) override {
    meanwhile();
    return ForwardingDriver::allocate_host(nbytes, max_bytes);
  }
  void grow_host(void* pointer, uint64_t nbytes) override {
    meanwhile();
    ForwardingDriver::grow_host(pointer, nbytes);
  }
  std::function<void()> meanwhile = [] {};
};

class RoomMaking : public testing::Test {
 protected:
  static constexpr uint64_t kBytes = 2 * kMiB;
  void SetUp() override {
    device_ = make_test_device("emulated");
    driver_ = std::make_shared<BusyDriver>(device_->driver);
    engine_ = Engine::open(driver_, device_->faults, BandwidthLimiters{});
    engine_->open_host_tier(64 * kMiB);
    pointer_ = device_->allocate(kBytes);
    device_->upload(pointer_, make_bytes(kBytes, 1));
  }
  void TearDown() override {
    engine_->close();
    engine_.reset();
    driver_.reset();
    device_->free(pointer_);
    EXPECT_EQ(device_->violations(), std::vector<std::string>{});
  }
  Token out(uint64_t offset = 0) {
    return Token(engine_->out_start(1, "host", offset, pointer_, kBytes, device_->stream));
  }

  std::unique_ptr<TestDevice> device_;
  std::shared_ptr<BusyDriver> driver_;
  std::shared_ptr<Engine> engine_;
  uint64_t pointer_ = 0;
};

TEST_F(RoomMaking, holds_up_no_other_call_of_the_engine) {
  int num_made = 0;
  const auto meanwhile = [&](const std::function<void()>& call) {
    driver_->meanwhile = [&num_made, call] {
      ++num_made;
      auto other = std::async(std::launch::async, call);
      if (other.wait_for(std::chrono::seconds(20)) == std::future_status::ready) return other.get();
      ADD_FAILURE() << "the engine's lock is held while room is made";
      std::abort();  // else it would be waited for
    };
  };
  engine_->reserve("host", 2 * kBytes);
  const Token kept = out();
  Token dropped = out(kBytes);
  meanwhile([&] {
    dropped.reset();
    const Token fits = out(kBytes);
    engine_->out_done(fits.handle(), device_->stream);
    const int64_t transfer = engine_->in_start(1, kept.handle(), pointer_, kBytes, device_->stream);
    engine_->in_done(kept.handle(), transfer, device_->stream);
    EXPECT_EQ(engine_->tier_stats("host").used_bytes, 2 * kBytes);
  });
  engine_->reserve("host", 3 * kBytes);  // for a plan
  EXPECT_EQ(num_made, 1);
  EXPECT_EQ(engine_->tier_stats("host").capacity_bytes, 3 * kBytes);
  const Token second = out(kBytes);
  Token third = out(2 * kBytes);
  meanwhile([&] { EXPECT_EQ(engine_->live_handles(), 3u); });
  const Token fits_nowhere = out();
  EXPECT_EQ(num_made, 2);
}

TEST_F(RoomMaking, an_engine_that_is_closed_meanwhile_refuses_what_room_was_made_for) {
  driver_->meanwhile = [&] { engine_->close(); };
  EXPECT_ERROR(out(), OptionError, "closed");
  EXPECT_EQ(engine_->live_handles(), 0u);
}

TEST_F(RoomMaking, is_done_by_one_thread_for_all_that_wait) {
  std::atomic<int> num_made = 0;
  driver_->meanwhile = [&] { ++num_made; };
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int step = 0; step < 20; ++step) {
        const Token token = out(i * kBytes);
        engine_->out_done(token.handle(), device_->stream);
      }
    });
  }
  threads.emplace_back([&] {
    for (uint64_t mib = 1; mib <= 64; ++mib) engine_->reserve("host", mib * kMiB);
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(num_made, 64);
  EXPECT_EQ(engine_->tier_stats("host").capacity_bytes, 64 * kMiB);
  EXPECT_EQ(engine_->tier_stats("host").used_bytes, 0u);
}

}  // namespace
}  // namespace lmswap::test::engine_test
