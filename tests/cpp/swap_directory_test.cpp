// Directories that other users could lead elsewhere are refused; the tests make them, so they run as root only.
#include "lmswap/tiers/swap_directory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "failing_system.h"
#include "test_device.h"

namespace lmswap::test::swap_directory_test {
namespace {

constexpr uid_t kOther = 12345;

class SwapDirectoryTest : public testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can make what belongs to others";
  }

  std::string make_directory(const std::string& name, uid_t owner, mode_t mode) {
    const std::string path = root_.path() + "/" + name;
    std::filesystem::create_directory(path);
    EXPECT_EQ(chown(path.c_str(), owner, owner), 0);
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return path;
  }
  std::string make_link(const std::string& name, const std::string& target, uid_t owner) {
    const std::string path = root_.path() + "/" + name;
    std::filesystem::create_symlink(target, path);
    EXPECT_EQ(lchown(path.c_str(), owner, owner), 0);
    return path;
  }

  TestDirectory root_;
};

TEST_F(SwapDirectoryTest, open_to_others_is_refused) {
  EXPECT_ERROR(SwapDirectory{make_directory("all", kOther, 0777)}, TierError, "belongs to another user (12345)");
  EXPECT_ERROR(SwapDirectory{make_directory("group", kOther, 0775)}, TierError, "chmod 700");
  EXPECT_ERROR(SwapDirectory{make_directory("ours", 0, 0777)}, TierError, "': is open to others");
}

TEST_F(SwapDirectoryTest, that_is_unwritable_by_others_or_owned_is_accepted) {
  EXPECT_NO_THROW(SwapDirectory{make_directory("sticky", kOther, 01777)});
  EXPECT_NO_THROW(SwapDirectory{make_directory("closed", kOther, 0755)});
  EXPECT_NO_THROW(SwapDirectory{make_directory("ours, sticky", 0, 01777)});
  EXPECT_NO_THROW(SwapDirectory{make_directory("our group's", 0, 0775)});
  EXPECT_NO_THROW(SwapDirectory{std::filesystem::relative(make_directory("near", 0, 0700)).string()});
}

TEST_F(SwapDirectoryTest, behind_a_link_of_another_user_is_refused_wherever_the_link_is) {
  const std::string ours = make_directory("ours", 0, 0700);
  std::filesystem::create_directory(ours + "/inner");
  const std::string link = make_link("link", ours, kOther);
  EXPECT_ERROR(SwapDirectory{link}, TierError, "'link' on the way to it is a symbolic link of another user");
  EXPECT_ERROR(SwapDirectory{link + "/inner"}, TierError, "symbolic link");
  EXPECT_ERROR(SwapDirectory{make_link("to_link", link, 0)}, TierError, "symbolic link");
}

TEST_F(SwapDirectoryTest, behind_links_of_our_own_is_taken) {
  const std::string ours = make_directory("ours", 0, 0700);
  EXPECT_NO_THROW(SwapDirectory{make_link("absolute", ours, 0)});
  EXPECT_NO_THROW(SwapDirectory{make_link("relative", "./ours", 0)});
  EXPECT_NO_THROW(SwapDirectory{make_link("upwards", "ours/../relative", 0)});
  EXPECT_ERROR(SwapDirectory{make_link("circle", "circle", 0)}, TierError, "symbolic links");
}

TEST_F(SwapDirectoryTest, is_the_one_that_was_looked_at_even_if_its_name_leads_elsewhere_later) {
  const std::string ours = make_directory("ours", 0, 0700), theirs = make_directory("theirs", kOther, 0777);
  const SwapDirectory directory(ours);
  std::filesystem::rename(ours, ours + ".moved");
  make_link("ours", theirs, kOther);
  const int file = directory.open_unnamed(O_DIRECT);
  ASSERT_GE(file, 0);
  const auto place = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(file)).string();
  EXPECT_NE(place.find("ours.moved"), std::string::npos) << place;
  close(file);
}

TEST(SwapFile, is_private_and_unlinked_and_cannot_be_linked) {
  const TestDirectory root;
  const mode_t mask = umask(0);
  const int file = SwapDirectory{root.path()}.open_unnamed(O_DIRECT);
  umask(mask);
  ASSERT_GE(file, 0);
  struct stat status = {};
  ASSERT_EQ(fstat(file, &status), 0);
  EXPECT_EQ(status.st_mode & 07777, mode_t{0600});
  EXPECT_EQ(status.st_nlink, nlink_t{0});
  EXPECT_TRUE(std::filesystem::is_empty(root.path()));
  const std::string ours = "/proc/self/fd/" + std::to_string(file), name = root.path() + "/named";
  EXPECT_NE(linkat(AT_FDCWD, ours.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW), 0);
  close(file);
}

// Where the filesystem makes no file without a name.
class NamedSwapFile : public testing::Test {
 protected:
  void SetUp() override { test::has_unnamed_files = false; }
  void TearDown() override {
    test::has_unnamed_files = test::has_direct_io = true;
    EXPECT_TRUE(std::filesystem::is_empty(root_.path()));
  }
  const TestDirectory root_;
};

TEST_F(NamedSwapFile, loses_its_name_at_once) {
  const int file = SwapDirectory{root_.path()}.open_unnamed(O_DIRECT);
  ASSERT_GE(file, 0);
  EXPECT_TRUE(std::filesystem::is_empty(root_.path()));
  close(file);
}

TEST_F(NamedSwapFile, is_not_left_behind_without_direct_io) {
  test::has_direct_io = false;
  EXPECT_ERROR(SwapDirectory{root_.path()}, TierError, "has no direct I/O");
}

TEST_F(NamedSwapFile, is_not_left_behind_where_it_cannot_be_removed_while_it_is_open) {
  test::fails_to_remove = true;
  EXPECT_ERROR(SwapDirectory{root_.path()}, TierError, "errno 16");
  EXPECT_FALSE(test::fails_to_remove);
}

}  // namespace
}  // namespace lmswap::test::swap_directory_test
