// Each call that a step makes of the driver or the disk fails once, one after the other: the error is reported, nothing
// leaks, and the same engine goes on.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "../../tools/emulated_gpu/device/system.h"
#include "lmswap/engine.h"
#include "test_device.h"

namespace lmswap::test::failing_calls_test {
namespace {

constexpr uint64_t kBytes = 20 << 10;
constexpr int kCode = 999, kMaxCalls = 400;

emulated_gpu::System& gpu() { return emulated_gpu::System::instance(); }

uint64_t events_held(const TestDevice& device) { return gpu().held().events - device.driver->num_idle_events(); }

// What `run` throws, as text; empty where nothing failed.
std::string error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// One training step as lmswap.runtime makes it: two buffers leave, compute goes on, both are swapped in.
class Step {
 public:
  Step(TestDevice& device, std::string tier) : device_(device), tier_(std::move(tier)) {
    for (uint64_t& pointer : pointers_) pointer = device_.allocate(kBytes);
  }
  ~Step() {
    for (const uint64_t pointer : pointers_) device_.free(pointer);
  }

  // Only when no copy of a step that failed touches its memory any more, which is what lmswap.runtime waits for too.
  void prepare(Engine& engine) {
    wait_under_way(engine);
    device_.driver->synchronize_stream(device_.stream);
    for (uint64_t i = 0; i < 2; ++i) device_.upload(pointers_[i], make_bytes(kBytes, i));
  }

  std::shared_ptr<Engine> open(const std::string& directory, SafetyOptions options = {}) const {
    auto engine = Engine::open(device_.driver, device_.faults, BandwidthLimiters{}, options);
    test::open_tier(*engine, tier_, 64 << 20, directory);
    engine->reserve(tier_, 4 * kBytes);
    return engine;
  }

  void wait_under_way(Engine& engine) {
    for (const int64_t transfer : under_way_) {
      while (!engine.is_finished(transfer)) std::this_thread::yield();
    }
    under_way_.clear();
  }

  void run(Engine& engine) {
    std::vector<Token> tokens;
    for (uint64_t i = 0; i < 2; ++i) {
      tokens.emplace_back(engine.out_start(1, tier_, i * kBytes, pointers_[i], kBytes, device_.stream));
      under_way_.push_back(engine.out_transfer(tokens.back().handle()));
    }
    for (const Token& token : tokens) engine.out_done(token.handle(), device_.stream);
    std::vector<Arrival> arrivals;
    for (uint64_t i = 0; i < 2; ++i) {
      const int64_t handle = tokens[i].handle();
      arrivals.push_back({handle, engine.in_start(1, handle, pointers_[2 + i], kBytes, device_.stream)});
      under_way_.push_back(arrivals.back().transfer);
    }
    for (const auto& [handle, transfer] : arrivals) engine.in_done(handle, transfer, device_.stream);
    engine.confirm();
    engine.take_mark(engine.mark(device_.stream));
    engine.take_records();
  }

  // The same for one buffer, cut short: no copy is waited for, and only what left is compared with its sums.
  void abandon(Engine& engine) {
    error_of([&] {
      const Token token(engine.out_start(1, tier_, 0, pointers_[0], kBytes, device_.stream));
      under_way_.push_back(engine.out_transfer(token.handle()));
      under_way_.push_back(engine.in_start(1, token.handle(), pointers_[2], kBytes, device_.stream));
    });
    if (!under_way_.empty()) error_of([&] { engine.take_checksums(under_way_.front()); });
    wait_under_way(engine);
  }

  // The events that are held when nothing is under way. A thread that has reported the end of its transfer may hold it
  // a moment longer, hence the wait for as few as that.
  uint64_t settled_events(Engine& engine, uint64_t num_events) {
    prepare(engine);
    engine.take_records();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (events_held(device_) > num_events && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    return events_held(device_);
  }

  bool has_right_bytes() const {
    return device_.download(pointers_[2], kBytes) == make_bytes(kBytes, 0) &&
           device_.download(pointers_[3], kBytes) == make_bytes(kBytes, 1);
  }

 private:
  TestDevice& device_;
  const std::string tier_;
  uint64_t pointers_[4];
  std::vector<int64_t> under_way_;
};

class FailingCalls : public testing::TestWithParam<std::string> {};

TEST_P(FailingCalls, any_call_of_the_driver_may_fail_and_the_engine_goes_on) {
  const TestDirectory directory;
  const auto device = make_test_device("emulated");
  Step step(*device, GetParam());
  const auto engine = step.open(directory.path());
  const uint64_t clock = 1;  // which the driver makes when a time is first requested
  const uint64_t num_events = events_held(*device) + clock;
  int num_told = 0, nth = 1;
  for (; nth < kMaxCalls; ++nth) {
    step.prepare(*engine);
    gpu().faults.plan("*", static_cast<uint64_t>(nth), kCode);
    const std::string error = error_of([&] { step.run(*engine); });
    const bool has_failed = gpu().faults.num_planned() == 0;
    gpu().faults.mend();
    if (!has_failed) break;
    if (!error.empty()) {
      ++num_told;
      EXPECT_NE(error.find("999"), std::string::npos) << error;
    }
    step.prepare(*engine);
    EXPECT_EQ(error_of([&] { step.run(*engine); }), "") << "after the failure of call " << nth << ", " << error;
    EXPECT_TRUE(step.has_right_bytes()) << nth << ": " << error;
    EXPECT_EQ(engine->live_handles(), 0u);
    EXPECT_EQ(engine->tier_stats(GetParam()).used_bytes, 0u);
  }
  RecordProperty("calls", nth - 1);
  RecordProperty("told", num_told);
  EXPECT_GT(num_told, 20);
  EXPECT_LT(nth, kMaxCalls);
  // Of the last two blocks given back: copies both ways have three events each until the next holder comes.
  constexpr uint64_t kMaxEvents = 2 * 2 * 3;
  EXPECT_LE(step.settled_events(*engine, num_events + kMaxEvents), num_events + kMaxEvents);
  engine->close();
  EXPECT_EQ(device->violations(), std::vector<std::string>{});
}

TEST_P(FailingCalls, a_failed_copy_is_released_once_it_can_no_longer_be_waited_for) {
  const TestDirectory directory;
  const auto device = make_test_device("emulated");
  Step step(*device, GetParam());
  // Of the last two blocks given back: copies both ways, their audits and the fill have three events each until the
  // next holder comes. One more is the driver's clock.
  constexpr uint64_t kMaxEvents = 2 * 5 * 3 + 1;
  for (const bool audits : {false, true}) {
    const auto engine = step.open(directory.path(), {.audits = audits});
    const uint64_t num_events = events_held(*device);
    int num_failed = 0;
    for (int i = 0; i < 200; ++i) {
      const int nth = 1 + i % 40;  // no step makes as many calls
      step.prepare(*engine);
      gpu().faults.plan("*", static_cast<uint64_t>(nth), kCode);
      step.abandon(*engine);
      num_failed += gpu().faults.num_planned() == 0;
      gpu().faults.mend();
    }
    EXPECT_GT(num_failed, 80);
    EXPECT_LE(step.settled_events(*engine, num_events + kMaxEvents), num_events + kMaxEvents);
    engine->close();
  }
  EXPECT_EQ(device->violations(), std::vector<std::string>{});
}

TEST_P(FailingCalls, any_call_may_fail_while_the_engine_opens) {
  const TestDirectory directory;
  const auto device = make_test_device("emulated");
  Step step(*device, GetParam());
  const auto before = [&] {
    const emulated_gpu::Held held = gpu().held();
    return std::vector{events_held(*device), held.contexts, held.streams, held.pinned_bytes, held.device_bytes};
  };
  device->driver->synchronize_stream(device->stream);
  const auto found = before();
  int num_told = 0, nth = 1;
  for (; nth < kMaxCalls; ++nth) {
    gpu().faults.plan("*", static_cast<uint64_t>(nth), kCode);
    const std::string error = error_of([&] { step.open(directory.path()); });
    const bool has_failed = gpu().faults.num_planned() == 0;
    gpu().faults.mend();
    EXPECT_EQ(before(), found) << nth << ": " << error;
    if (!has_failed) break;
    if (error.empty()) continue;  // it failed while the engine closed again, where nothing depends on it
    ++num_told;
    EXPECT_NE(error.find("999"), std::string::npos) << nth << ": " << error;
  }
  EXPECT_GT(num_told, 1);
  EXPECT_LT(nth, kMaxCalls);
  EXPECT_EQ(device->violations(), std::vector<std::string>{});
}

INSTANTIATE_TEST_SUITE_P(Tiers, FailingCalls, testing::ValuesIn(test::tiers_of("emulated")),
                         [](const auto& info) { return info.param; });

// On ordinary memory: calls of the host driver and of the disk, by number.
struct Call {
  const char* tier;
  const char* name;
  int num;  // in a step
};

class FailingHostCalls : public testing::TestWithParam<Call> {};

TEST_P(FailingHostCalls, each_of_them_may_fail_and_the_engine_goes_on) {
  const TestDirectory directory;
  for (int nth = 1; nth <= GetParam().num; ++nth) {
    const auto device = make_test_device("host", std::string(GetParam().name) + "@" + std::to_string(nth) + "=fail");
    Step step(*device, GetParam().tier);
    const auto engine = step.open(directory.path());
    step.prepare(*engine);
    EXPECT_NE(error_of([&] { step.run(*engine); }), "") << nth;
    step.prepare(*engine);
    EXPECT_EQ(error_of([&] { step.run(*engine); }), "") << nth;
    EXPECT_TRUE(step.has_right_bytes()) << nth;
    EXPECT_EQ(engine->live_handles(), 0u);
    EXPECT_EQ(engine->tier_stats(GetParam().tier).used_bytes, 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, FailingHostCalls,
                         testing::Values(Call{"host", "copy_out", 2}, Call{"host", "copy_in", 2},
                                         Call{"device", "copy_between", 4}, Call{"peer", "copy_between", 4},
                                         Call{"disk", "write", 2}, Call{"disk", "read", 2},
                                         Call{"compressed", "write", 2}, Call{"compressed", "read", 2}),
                         [](const auto& info) { return std::string(info.param.tier) + "_" + info.param.name; });

}  // namespace
}  // namespace lmswap::test::failing_calls_test
