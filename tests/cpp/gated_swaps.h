// Swaps where the device waits for the host: one tensor there and back, while the device's stream is held or shared.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <optional>
#include <thread>

#include "../../tools/emulated_gpu/device/system.h"
#include "lmswap/engine.h"
#include "test_device.h"

namespace lmswap::test {

// Holds up the device's stream until it is let go, which it is at the latest when the test ends.
class Held {
 public:
  explicit Held(TestDevice& device) : hold_(device.driver) { hold_.begin(device.stream, kForever); }
  void let_go() { hold_.end(); }

 private:
  static constexpr double kForever = 600;
  StreamHold hold_;
};

// Whether it comes to its end although the stream is held; lets go of that if not.
template <typename Run>
bool is_done_while(Held& held, Run run) {
  auto done = std::async(std::launch::async, run);
  const bool is_done = done.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  held.let_go();
  done.get();
  return is_done;
}

class GatedSwaps : public testing::Test {
 protected:
  GatedSwaps(std::string tier, uint64_t nbytes) : tier_(std::move(tier)), nbytes_(nbytes) {}

  // With the tier still to be opened.
  void open(std::unique_ptr<TestDevice> device, BandwidthLimiters limiters) {
    device_ = std::move(device);
    engine_ = Engine::open(device_->driver, device_->faults, std::move(limiters));
    source_ = device_->allocate(nbytes_);
    target_ = device_->allocate(nbytes_);
    device_->upload(source_, sent());
    forget_arrived();
  }
  void TearDown() override {
    engine_->close();
    for (const uint64_t pointer : {source_, target_}) device_->free(pointer);
    EXPECT_EQ(device_->violations(), std::vector<std::string>{});
  }

  Token out() {
    Token token(engine_->out_start(1, tier_, 0, source_, nbytes_, device_->stream));
    engine_->out_done(token.handle(), device_->stream);
    return token;
  }
  int64_t in(const Token& token) {
    const int64_t transfer = engine_->in_start(1, token.handle(), target_, nbytes_, device_->stream);
    engine_->in_done(token.handle(), transfer, device_->stream);
    return transfer;
  }
  Token there_and_back(int num_times = 1) {
    std::optional<Token> token;
    for (int i = 0; i < num_times; ++i) {
      token.emplace(out());
      in(*token);
    }
    return std::move(*token);
  }
  // To its end although the device has not begun; then it may.
  Token there_and_back_while_held(int num_times = 1) {
    Held held(*device_);
    std::optional<Token> token;
    EXPECT_TRUE(is_done_while(held, [&] { token.emplace(there_and_back(num_times)); }));
    return std::move(*token);
  }
  void there_and_back_whatever_the_queues() {
    for (const emulated_gpu::Queues queues : {emulated_gpu::Queues{false, 3}, {true, 0}, {true, 3}}) {
      emulated_gpu::System::instance().configure(queues);
      auto done = std::async(std::launch::async, [&] {
        there_and_back(3);
        engine_->confirm();
      });
      if (done.wait_for(std::chrono::minutes(2)) != std::future_status::ready) {
        std::fputs("the host waits for ever, and so would whoever wanted to give anything back\n", stderr);
        std::abort();
      }
      EXPECT_EQ(arrived(), sent());
      forget_arrived();
    }
  }
  // What was queued, and has not begun, is ended by closing.
  void close_while_held(int num_times) {
    Held held(*device_);
    const Token token = there_and_back(num_times);
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      held.let_go();
    });
    engine_->close();
    later.join();
    EXPECT_EQ(arrived(), sent());
  }

  Bytes sent() const { return make_bytes(nbytes_, 1); }
  Bytes arrived() { return device_->download(target_, nbytes_); }
  void forget_arrived() { device_->upload(target_, make_bytes(nbytes_, 2)); }

  const std::string tier_;
  const uint64_t nbytes_;
  TestDirectory directory_;
  std::unique_ptr<TestDevice> device_;
  std::shared_ptr<Engine> engine_;
  uint64_t source_ = 0, target_ = 0;
};

}  // namespace lmswap::test
