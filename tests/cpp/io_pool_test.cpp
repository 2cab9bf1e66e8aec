#include "lmswap/tiers/io_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "lmswap/lanes/request_limiter.h"

namespace lmswap::io_pool_test {
namespace {

TEST(IoPool, runs_jobs_in_order_and_all_of_them_before_it_ends) {
  std::vector<int> order;
  {
    IoPool pool(1);
    for (int i = 0; i < 100; ++i) pool.submit([&order, i](Scratch) { order.push_back(i); });
  }
  ASSERT_EQ(order.size(), 100u);
  for (size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], static_cast<int>(i));
}

// Each job waits for the other: with less than two at once this would never end.
TEST(IoPool, runs_as_many_jobs_at_once_as_it_has_threads) {
  std::atomic<int> num_running = 0;
  std::vector<std::byte*> bounces(2);
  {
    IoPool pool(2);
    for (size_t i = 0; i < 2; ++i) {
      pool.submit([&num_running, &bounces, i](Scratch scratch) {
        bounces[i] = scratch.data();
        ++num_running;
        while (num_running < 2) std::this_thread::yield();
      });
    }
  }
  EXPECT_NE(bounces[0], bounces[1]);
  for (const std::byte* scratch : bounces) EXPECT_EQ(reinterpret_cast<uintptr_t>(scratch) % kPageBytes, 0u);
}

TEST(RequestLimiter, keeps_out_what_exceeds_its_size) {
  RequestLimiter limiter(2);
  std::atomic<int> num_inside = 0, max_inside = 0;
  {
    IoPool pool(4);
    for (int i = 0; i < 200; ++i) {
      pool.submit([&](Scratch) {
        limiter.acquire();
        const int now = ++num_inside;
        for (int most = max_inside; now > most && !max_inside.compare_exchange_weak(most, now);) {
        }
        std::this_thread::yield();
        --num_inside;
        limiter.release();
      });
    }
  }
  limiter.wait_until_idle();
  EXPECT_LE(max_inside, 2);
}

}  // namespace
}  // namespace lmswap::io_pool_test
