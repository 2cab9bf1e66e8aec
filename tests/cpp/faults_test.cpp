#include "lmswap/faults.h"

#include <gtest/gtest.h>

#include "test_device.h"

namespace lmswap::faults_test {
namespace {

TEST(Faults, hit_the_nth_call_and_no_other) {
  Faults faults("write@2=fail,read@*=short");
  EXPECT_FALSE(faults.next("write").fail);
  EXPECT_TRUE(faults.next("write").fail);
  EXPECT_FALSE(faults.next("write").fail);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(faults.next("read").is_short);
}

TEST(Faults, hit_a_share_of_the_calls) {
  Faults faults("read@0.25=fail");
  int num_failed = 0;
  for (int i = 0; i < 4000; ++i) num_failed += faults.next("read").fail;
  EXPECT_GT(num_failed, 800);
  EXPECT_LT(num_failed, 1200);
}

TEST(Faults, add_up_and_stay_below_their_bound) {
  Faults faults("copy_in@*=late:1.5,copy_in@*=jitter:0.5");
  for (int i = 0; i < 20; ++i) {
    const double late = faults.next("copy_in").late_seconds;
    EXPECT_GE(late, 1.5);
    EXPECT_LE(late, 2.0);
  }
}

TEST(Faults, refuse_what_cannot_be_read) {
  for (const char* text :
       {"write", "write@1", "write=fail", "copy@1=fail", "write@0=fail", "write@0.0=fail", "write@1.5=fail",
        "write@x=fail", "write@1=flip", "write@1=explode", "write@1=late", "write@1=fail:3", "write@1=late:x"}) {
    EXPECT_ERROR(Faults{text}, OptionError, text);
  }
}

}  // namespace
}  // namespace lmswap::faults_test
