#include "lmswap/float_mode.h"

#include <gtest/gtest.h>

#include <cfenv>
#include <thread>

namespace lmswap::float_mode_test {
namespace {

TEST(FloatMode, distinguishes_rounding_modes_and_ignores_exception_flags) {
  const uint64_t before = float_mode();
  std::feraiseexcept(FE_INEXACT);
  EXPECT_EQ(float_mode(), before);
  std::fesetround(FE_UPWARD);
  const uint64_t upward = float_mode();
  std::fesetround(FE_TONEAREST);
  EXPECT_NE(upward, before);
  EXPECT_EQ(float_mode(), before);
}

TEST(FloatMode, is_each_threads_own) {
  const uint64_t before = float_mode();
  std::thread([&] {
    std::fesetround(FE_TOWARDZERO);
    EXPECT_NE(float_mode(), before);
  }).join();
  EXPECT_EQ(float_mode(), before);
}

}  // namespace
}  // namespace lmswap::float_mode_test
