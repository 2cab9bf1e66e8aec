// Random swaps from several threads, everything late by random times: the bytes must be right, and nothing left behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "lmswap/engine.h"
#include "test_device.h"

namespace lmswap::test::stress_test {
namespace {

constexpr uint64_t kMaxBytes = 300 * 1024, kCapacity = 4 * kMaxBytes;
constexpr int kNumThreads = 3, kNumSteps = 40;

// A swapped buffer of one thread.
struct Swapped {
  std::unique_ptr<DLManagedTensor, void (*)(DLManagedTensor*)> token;
  uint64_t nbytes, seed;
  int64_t handle() const { return *static_cast<const int64_t*>(token->dl_tensor.data); }
};

class Worker {
 public:
  Worker(TestDevice& device, Engine& engine, const std::vector<std::string>& tiers, unsigned seed)
      : device_(device),
        engine_(engine),
        tiers_(tiers),
        stream_(device.make_stream()),
        random_(seed),
        pointer_(device.allocate(kMaxBytes)) {}
  ~Worker() { device_.free(pointer_); }

  void run() {
    for (int step = 0; step < kNumSteps; ++step) {
      const uint64_t action = draw(3);
      if (swapped_.empty() || (action == 0 && swapped_.size() < 4)) {
        swap_out();
      } else if (action == 1) {
        swapped_.erase(pick());
      } else {
        swap_in(*pick());
      }
    }
    swapped_.clear();
  }

 private:
  uint64_t draw(uint64_t most) { return std::uniform_int_distribution<uint64_t>(0, most)(random_); }

  std::vector<Swapped>::iterator pick() {
    return swapped_.begin() + static_cast<std::ptrdiff_t>(draw(swapped_.size() - 1));
  }

  void swap_out() {
    const uint64_t nbytes = 1 + draw(kMaxBytes - 1), seed = draw(1 << 30),
                   offset = draw(kCapacity / kPageBytes) * kPageBytes;
    device_.driver->synchronize_stream(stream_);
    device_.upload(pointer_, make_bytes(nbytes, seed));
    auto* token = engine_.out_start(1, tiers_[draw(tiers_.size() - 1)], offset, pointer_, nbytes, stream_);
    swapped_.push_back({{token, [](DLManagedTensor* self) { self->deleter(self); }}, nbytes, seed});
    if (draw(3) == 0) swap_in(swapped_.back());  // while its own copy out may still be under way
    engine_.out_done(swapped_.back().handle(), stream_);
  }

  void swap_in(const Swapped& swapped) {
    const uint64_t target = device_.allocate(kMaxBytes);
    const int64_t handle = swapped.handle();
    engine_.in_done(handle, engine_.in_start(2, handle, target, swapped.nbytes, stream_), stream_);
    engine_.confirm();
    device_.driver->synchronize_stream(stream_);
    EXPECT_EQ(device_.download(target, swapped.nbytes), make_bytes(swapped.nbytes, swapped.seed));
    device_.free(target);
  }

  TestDevice& device_;
  Engine& engine_;
  const std::vector<std::string>& tiers_;
  const StreamHandle stream_;
  std::mt19937 random_;
  const uint64_t pointer_;
  std::vector<Swapped> swapped_;
};

class Stress : public testing::TestWithParam<std::string> {};

TEST_P(Stress, random_swaps_from_several_threads_keep_all_bytes) {
  const TestDirectory directory;
  const auto device = make_test_device(GetParam(),
                                       "copy_out@*=jitter:0.002,copy_in@*=jitter:0.002,copy_between@*=jitter:0.002,"
                                       "write@*=jitter:0.002,read@*=jitter:0.002",
                                       0.002);
  const auto engine = Engine::open(device->driver, device->faults, BandwidthLimiters{});
  const std::vector<std::string> tiers = test::tiers_of(GetParam());
  for (const std::string& tier : tiers) {
    test::open_tier(*engine, tier, 64 << 20, directory.path());
    engine->reserve(tier, kCapacity);
  }
  {
    std::vector<std::unique_ptr<Worker>> workers;
    for (unsigned i = 0; i < kNumThreads; ++i) workers.push_back(std::make_unique<Worker>(*device, *engine, tiers, i));
    std::vector<std::thread> threads;
    for (const auto& worker : workers) threads.emplace_back([&] { worker->run(); });
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(engine->live_handles(), 0u);
  for (const std::string& tier : tiers) {
    EXPECT_EQ(engine->tier_stats(tier).used_bytes, 0u);
    EXPECT_EQ(engine->tier_stats(tier).capacity_bytes, kCapacity);
  }
  engine->close();
  EXPECT_EQ(device->violations(), std::vector<std::string>{});
}

INSTANTIATE_TEST_SUITE_P(Devices, Stress, testing::ValuesIn(test::test_device_kinds()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace lmswap::test::stress_test
