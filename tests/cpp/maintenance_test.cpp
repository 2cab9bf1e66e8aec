// Maintenance of tiers' bytes: audits, poison, wiping; on each driver and tier.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>

#include "../../tools/emulated_gpu/device/system.h"
#include "lmswap/checksum.h"
#include "lmswap/engine.h"
#include "test_device.h"

namespace lmswap::test::maintenance_test {
namespace {

constexpr uint64_t kMiB = 1 << 20, kBytes = 3 * kMiB + 777, kLimit = 64 * kMiB;

// Hands everything on, and notes what is in memory when it is given back.
class NotingDriver final : public test::ForwardingDriver {
 public:
  using ForwardingDriver::ForwardingDriver;

  void* allocate_host(uint64_t nbytes, uint64_t max_bytes) override {
    void* pointer = ForwardingDriver::allocate_host(nbytes, max_bytes);
    std::memset(pointer, 0x11, nbytes);
    sizes_[pointer] = nbytes;
    return pointer;
  }
  void grow_host(void* pointer, uint64_t nbytes) override {
    uint64_t& known_bytes = sizes_[pointer];
    ForwardingDriver::grow_host(pointer, nbytes);
    std::memset(static_cast<std::byte*>(pointer) + known_bytes, 0x11, nbytes - known_bytes);
    known_bytes = nbytes;
  }
  void free_host(void* pointer) noexcept override {
    const test::Bytes zeros(sizes_[pointer]);
    num_unclean += std::memcmp(pointer, zeros.data(), zeros.size()) != 0 ? 1 : 0;
    ++num_freed;
    ForwardingDriver::free_host(pointer);
  }
  void fill(uint64_t device, std::byte value, uint64_t nbytes, StreamHandle stream) override {
    ForwardingDriver::fill(device, value, nbytes, stream);
    if (value == std::byte{0}) zeroed_device_bytes += nbytes;
  }

  std::shared_ptr<Driver> open_peer(int number) override {
    return peer_ = std::make_shared<NotingDriver>(ForwardingDriver::open_peer(number));
  }
  uint64_t zeroed_peer_bytes() const { return peer_ ? peer_->zeroed_device_bytes : 0; }

  const std::byte* memory_of(uint64_t nbytes) const {
    const auto found =
        std::find_if(sizes_.begin(), sizes_.end(), [&](const auto& kept) { return kept.second == nbytes; });
    return static_cast<const std::byte*>(found->first);
  }

  uint64_t num_unclean = 0, num_freed = 0, zeroed_device_bytes = 0;

 private:
  std::map<void*, uint64_t> sizes_;
  std::shared_ptr<NotingDriver> peer_;
};

class MaintenanceConformance : public testing::TestWithParam<TierSetup> {
 protected:
  void open(SafetyOptions options, const std::string& faults = "") {
    device_ = make_test_device(GetParam().device, faults);
    driver_ = std::make_shared<NotingDriver>(device_->driver);
    engine_ = Engine::open(driver_, device_->faults, BandwidthLimiters{}, options);
    test::open_tier(*engine_, tier(), kLimit, directory_.path());
    engine_->reserve(tier(), 4 * kMiB);
    a_ = device_->allocate(kBytes);
    b_ = device_->allocate(kBytes);
  }
  void TearDown() override {
    if (!engine_) return;  // skipped
    engine_->close();
    engine_.reset();
    driver_.reset();
    device_->free(a_);
    device_->free(b_);
    EXPECT_EQ(device_->violations(), std::vector<std::string>{});
  }

  std::string tier() const { return GetParam().tier; }
  bool is_spare() const { return tier() == "device" || tier() == "peer"; }
  Token out(uint64_t pointer) { return Token(engine_->out_start(1, tier(), 0, pointer, kBytes, device_->stream)); }
  Arrival in(const Token& token, uint64_t pointer) {
    return {token.handle(), engine_->in_start(1, token.handle(), pointer, kBytes, device_->stream)};
  }
  void out_done(const Token& token) { engine_->out_done(token.handle(), device_->stream); }
  void in_done(const Arrival& arrival) {
    engine_->in_done(arrival.handle, arrival.transfer, device_->stream);
    engine_->confirm();
  }

  // A descriptor of our own of the tier's unnamed file, found by its size.
  static int find_file() {
    for (int i = 3; i < 256; ++i) {
      if (lseek(i, 0, SEEK_END) == 4 * kMiB && (fcntl(i, F_GETFL) & O_DIRECT)) return dup(i);
    }
    return -1;
  }
  static test::Bytes read_file(int file, uint64_t offset, uint64_t nbytes) {
    test::Bytes bytes(nbytes);
    const int buffered = ::open(("/proc/self/fd/" + std::to_string(file)).c_str(), O_RDONLY | O_CLOEXEC);
    EXPECT_EQ(pread(buffered, bytes.data(), nbytes, static_cast<off_t>(offset)), static_cast<ssize_t>(nbytes));
    close(buffered);
    close(file);
    return bytes;
  }

  // The bytes of the tier's slab, from behind the engine's back.
  test::Bytes look(uint64_t offset, uint64_t nbytes) const {
    if (tier() == "disk") return read_file(find_file(), offset, nbytes);
    const std::byte* slab = driver_->memory_of(4 * kMiB) + offset;
    return {slab, slab + nbytes};
  }

  TestDirectory directory_;
  std::unique_ptr<TestDevice> device_;
  std::shared_ptr<NotingDriver> driver_;
  std::shared_ptr<Engine> engine_;
  uint64_t a_ = 0, b_ = 0;
};

TEST_P(MaintenanceConformance, audits_sum_the_tiers_bytes_after_each_copy) {
  open({.audits = true});
  const auto bytes = make_bytes(kBytes, 1);
  device_->upload(a_, bytes);
  const Token token = out(a_);
  out_done(token);
  const Arrival arrival = in(token, b_);
  in_done(arrival);
  Checksums expected(kBytes);
  expected.update(0, bytes.data(), kBytes);
  EXPECT_EQ(expected.sums().size(), 4u);
  EXPECT_EQ(engine_->take_checksums(engine_->out_transfer(token.handle())), expected.sums());
  EXPECT_EQ(engine_->take_checksums(arrival.transfer), expected.sums());
  EXPECT_ERROR(engine_->take_checksums(arrival.transfer), OptionError, "taken before");
  EXPECT_EQ(device_->download(b_, kBytes), bytes);
}

TEST_P(MaintenanceConformance, without_audits_there_are_no_sums) {
  open({});
  const Token token = out(a_);
  out_done(token);
  EXPECT_ERROR(engine_->take_checksums(engine_->out_transfer(token.handle())), OptionError, "not audited");
}

TEST_P(MaintenanceConformance, a_freed_block_is_overwritten) {
  if (is_spare()) GTEST_SKIP() << "its bytes cannot be looked at beside the engine";
  if (tier() == "compressed") GTEST_SKIP() << "its bytes are looked at in compressed_memory_test.cpp";
  for (const bool audits : {true, false}) {
    SCOPED_TRACE(audits);
    open({.audits = audits, .wipes = !audits});
    device_->fill(a_, kBytes, std::byte{0x77});
    Token token = out(a_);
    out_done(token);
    device_->download(a_, 1);
    const test::Bytes swapped(kBytes - kPageBytes, std::byte{0x77});
    for (int i = 0; i < 1000 && look(kPageBytes, swapped.size()) != swapped; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));  // staged bytes land later than out_done
    }
    EXPECT_EQ(look(kPageBytes, swapped.size()), swapped);
    token.reset();
    // The next holder of its first page waits for the whole of it to be overwritten.
    const Token next(engine_->out_start(1, tier(), 0, b_, 1, device_->stream));
    out_done(next);
    device_->download(b_, 1);
    const std::byte filler = audits ? std::byte{0xff} : std::byte{0};
    EXPECT_EQ(look(kPageBytes, kBytes - kPageBytes), test::Bytes(kBytes - kPageBytes, filler));
    if (audits) TearDown();
  }
}

TEST_P(MaintenanceConformance, a_block_is_not_overwritten_while_a_copy_still_reads_it) {
  open({.audits = true});
  const auto bytes = make_bytes(kBytes, 2);
  device_->upload(a_, bytes);
  Token token = out(a_);
  out_done(token);
  device_->fill(b_, kBytes, std::byte{0});  // slow: the copy in begins late
  const Arrival arrival = in(token, b_);
  token.reset();
  while (!engine_->is_finished(arrival.transfer)) std::this_thread::yield();
  EXPECT_EQ(device_->download(b_, kBytes), bytes);
}

TEST_P(MaintenanceConformance, the_next_holder_waits_until_its_block_has_been_overwritten) {
  open({.wipes = true});
  const auto bytes = make_bytes(kBytes, 3);
  for (int i = 0; i < 5; ++i) {
    device_->fill(a_, kBytes, std::byte{1});
    out(a_);  // given back at once
    device_->driver->synchronize_stream(device_->stream);
    device_->upload(b_, bytes);
    const Token token = out(b_);
    out_done(token);
    device_->fill(b_, kBytes, std::byte{0});
    in_done(in(token, b_));
    EXPECT_EQ(device_->download(b_, kBytes), bytes);
    EXPECT_EQ(engine_->tier_stats(tier()).capacity_bytes, 4 * kMiB) << "the place was not taken over";
  }
}

TEST_P(MaintenanceConformance, nothing_is_left_in_host_memory_after_close) {
  open({.wipes = true});
  device_->fill(a_, kBytes, std::byte{0x77});
  const Token held = out(a_);
  out_done(held);
  in_done(in(held, b_));
  device_->download(b_, 1);
  engine_->close();
  if (is_spare()) {
    EXPECT_GE(driver_->zeroed_device_bytes + driver_->zeroed_peer_bytes(), 4 * kMiB);
  } else {
    const uint64_t num_least = tier() == "host" ? 2 : GetParam().device == "host" ? 1 : 3;
    EXPECT_GE(driver_->num_freed, num_least);
  }
  EXPECT_EQ(driver_->num_unclean, 0u);
}

TEST_P(MaintenanceConformance, nothing_is_left_in_the_file_after_close) {
  if (tier() != "disk") GTEST_SKIP();
  for (const bool wipes : {true, false}) {
    open({.wipes = wipes});
    device_->fill(a_, kBytes, std::byte{0x77});
    const Token held = out(a_);
    out_done(held);
    in_done(in(held, b_));
    device_->download(b_, 1);
    const int file = find_file();
    ASSERT_GE(file, 0);
    engine_->close();
    const auto bytes = read_file(file, 0, 4 * kMiB);
    EXPECT_EQ(bytes == test::Bytes(4 * kMiB), wipes);
    if (wipes) TearDown();
  }
}

TEST_P(MaintenanceConformance, failing_copies_leave_nothing_behind_either) {
  if (GetParam().device == "cuda" && !test::is_io(tier())) GTEST_SKIP() << "a real device does not fail on demand";
  const std::string call = test::is_io(tier()) ? "write" : tier() == "host" ? "copy_out" : "copy_between";
  open({.audits = true, .wipes = true}, call + "@1=fail");
  {
    const Token token = out(a_);
    try {
      out_done(token);
    } catch (const Error& error) {
      EXPECT_NE(dynamic_cast<const TransferError*>(&error), nullptr);
    }
    EXPECT_ERROR(engine_->take_checksums(engine_->out_transfer(token.handle())), TransferError, "");
  }
  const auto bytes = make_bytes(kBytes, 4);
  device_->upload(a_, bytes);
  const Token token = out(a_);
  out_done(token);
  in_done(in(token, b_));
  EXPECT_EQ(device_->download(b_, kBytes), bytes);
}

// Of another model's step, say, on other streams: whatever is called here, on whatever thread, does not break it.
TEST(MaintenanceOnAGpu, breaks_no_capture_of_a_graph) {
  for (const bool can_wait : {true, false}) {
    const auto device = make_test_device(can_wait ? "emulated" : "emulated_one_queue");
    const TestDirectory directory;
    const uint64_t pointer = device->allocate(kBytes);
    emulated_gpu::System& gpu = emulated_gpu::System::instance();
    gpu.is_capturing = true;
    for (const std::string& tier : test::tiers_of("emulated")) {
      const auto engine =
          Engine::open(device->driver, device->faults, BandwidthLimiters{}, {.audits = true, .wipes = true});
      test::open_tier(*engine, tier, kLimit, directory.path());
      for (int i = 0; i < 2; ++i) {
        const Token token(engine->out_start(1, tier, 0, pointer, kBytes, device->stream));
        engine->out_done(token.handle(), device->stream);
        const int64_t transfer = engine->in_start(1, token.handle(), pointer, kBytes, device->stream);
        engine->in_done(token.handle(), transfer, device->stream);
        engine->confirm();
        engine->take_checksums(transfer);
      }
      engine->take_records();
      engine->close();
    }
    gpu.is_capturing = false;
    EXPECT_EQ(device->violations(), std::vector<std::string>{});
    device->free(pointer);
  }
}

INSTANTIATE_TEST_SUITE_P(All, MaintenanceConformance, testing::ValuesIn(test::tier_setups()),
                         [](const auto& info) { return info.param.tier + "_on_" + info.param.device; });

}  // namespace
}  // namespace lmswap::test::maintenance_test
