// Threads and memory that the host refuses are an error that names them, and never the end of the process.
#include <gtest/gtest.h>

#include <new>
#include <string>

#include "failing_system.h"
#include "lmswap/engine.h"
#include "lmswap/lanes/direct_backend.h"
#include "lmswap/lanes/gated_backend.h"
#include "lmswap/lanes/staged_backend.h"
#include "lmswap/tiers/host_range.h"
#include "test_device.h"

namespace lmswap::test::host_limits_test {
namespace {

class RefusedThreads : public testing::Test {
 protected:
  void TearDown() override { test::refused_thread = 0; }
};

TEST_F(RefusedThreads, of_a_pool_end_those_that_it_has_and_say_which_limits_there_are) {
  for (int nth = 1; nth <= 4; ++nth) {
    test::refused_thread = nth;
    try {
      const IoPool pool(4);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_NE(dynamic_cast<const TierError*>(&error), nullptr);
      const std::string name = "I/O thread " + std::to_string(nth) + " of 4 cannot be started";
      for (const std::string& part : {name, std::string("errno 11"), std::string("ulimit -u"), std::string("pids.max"),
                                      std::string("Raise the limit")}) {
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      }
    }
  }
}

TEST_F(RefusedThreads, of_a_tier_leave_the_engine_as_it_was) {
  const test::TestDirectory directory;
  for (const char* tier : {"disk", "compressed"}) {
    const auto device = make_test_device("host");
    const auto engine = Engine::open(device->driver, device->faults, BandwidthLimiters{});
    constexpr int kThreads = 3 + 2;  // for I/O, and one each way
    for (int nth = 1; nth <= kThreads; ++nth) {
      test::refused_thread = nth;
      EXPECT_ERROR(test::open_tier(*engine, tier, 1 << 20, directory.path()), TierError, "cannot be started");
    }
    test::refused_thread = kThreads + 1;
    test::open_tier(*engine, tier, 1 << 20, directory.path());
    test::refused_thread = 0;
    engine->close();
  }
}

TEST_F(RefusedThreads, of_maintenance_and_of_a_stream_are_errors) {
  const auto device = make_test_device("host");
  test::refused_thread = 1;
  EXPECT_ERROR(device->driver->create_stream(), DriverError, "cannot be started");
  test::refused_thread = 2;  // the first is the stream's
  EXPECT_ERROR(Engine::open(device->driver, device->faults, BandwidthLimiters{}, {.audits = true}), TierError,
               "cannot be started");
}

TEST_F(RefusedThreads, that_would_zero_memory_are_not_needed) {
  constexpr uint64_t kBytes = uint64_t{160} << 20;  // of more than one
  test::refused_thread = 1;
  HostRange range(kBytes, -1);
  range.extend(kBytes);
  for (uint64_t at = 0; at < kBytes; at += kBytes / 8) EXPECT_EQ(range.data()[at], std::byte{0});
}

// Bytes that cannot be moved, as the process may have no more memory.
class FullMemory final : public IoStorage {
 public:
  explicit FullMemory(uint64_t nbytes) : IoStorage("disk", nbytes, -1, std::make_shared<Faults>("")) {}
  void write(uint64_t, const std::byte*, uint64_t, Scratch) override { throw std::bad_alloc(); }
  void read(uint64_t, std::byte*, uint64_t, Scratch) override { throw std::bad_alloc(); }
  void read_back(uint64_t, std::byte*, uint64_t) override {}
  void fill(uint64_t, uint64_t, std::byte) override {}
};

class RefusedMemory : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<TransferBackend> make_backend(IoPool& pool) const {
    if (GetParam() == "direct") return std::make_unique<DirectBackend>(pool, 2, BandwidthLimiter());
    if (GetParam() == "gated") return std::make_unique<GatedBackend>(device_->driver, pool, 2, BandwidthLimiter());
    return std::make_unique<StagedBackend>(device_->driver, pool, 2, BandwidthLimiter());
  }
  const std::unique_ptr<test::TestDevice> device_ = make_test_device(GetParam() == "direct" ? "host" : "emulated");
};

TEST_P(RefusedMemory, of_a_request_is_its_transfers_error) {
  constexpr uint64_t kBytes = 3 * kRequestBytes;
  const uint64_t pointer = device_->allocate(kBytes);
  const Block block{std::make_shared<FullMemory>(kBytes), 0, kBytes};
  for (const Direction direction : {Direction::kOut, Direction::kIn}) {
    IoPool pool(2);
    Lane lane(make_backend(pool), true);
    const auto transfer = std::make_shared<Transfer>(device_->driver, direction, 1, 1, pointer, block);
    transfer->ready.record(device_->stream);
    lane.submit(transfer);
    EXPECT_FALSE(transfer->state.wait_landed());
    EXPECT_NE(transfer->state.error_text().find("refused host memory"), std::string::npos)
        << transfer->state.error_text();
    while (!transfer->state.is_device_free()) std::this_thread::yield();
  }
  device_->free(pointer);
  EXPECT_EQ(device_->violations(), std::vector<std::string>{});
}

INSTANTIATE_TEST_SUITE_P(Backends, RefusedMemory, testing::Values("direct", "staged", "gated"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace lmswap::test::host_limits_test
