// Where the memory that is pinned comes from, and that it stays where it is.
#include "lmswap/tiers/host_range.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "lmswap/tiers/arena.h"
#include "test_device.h"

namespace lmswap {
namespace {

constexpr uint64_t kHugePageBytes = 2 << 20;

bool is_there(const std::byte* page) {
  unsigned char is_resident = 0;
  return mincore(const_cast<std::byte*>(page), kPageBytes, &is_resident) == 0 && (is_resident & 1) != 0;
}

TEST(HostRange, is_extended_in_place_and_all_there) {
  HostRange range(1 << 30, -1);
  EXPECT_EQ(range.nbytes(), 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(range.data()) % kHugePageBytes, 0u);
  std::byte* const data = range.data();
  uint64_t before = 0;
  for (const uint64_t nbytes : {uint64_t{1}, 3 * kPageBytes, uint64_t{200} << 20}) {  // the last by several threads
    range.extend(nbytes);
    ASSERT_EQ(range.data(), data);
    ASSERT_EQ(range.nbytes(), round_to_pages(nbytes));
    for (uint64_t at = before; at < range.nbytes(); at += kPageBytes) {
      ASSERT_TRUE(is_there(data + at)) << at;
      ASSERT_EQ(data[at], std::byte{0}) << at;
      data[at] = std::byte{7};
    }
    before = range.nbytes();
  }
  EXPECT_EQ(data[0], std::byte{7});
}

TEST(HostRange, is_refused_what_it_has_no_addresses_for) {
  HostRange range(4 * kPageBytes, -1);
  EXPECT_ERROR(range.extend(4 * kPageBytes + 1), ErrorKind::kDriver, "20480");
  EXPECT_ERROR(HostRange(uint64_t{1} << 62, -1), ErrorKind::kDriver, "mmap of");
}

TEST(HostRange, gives_memory_back_from_its_end) {
  HostRange range(4 * kPageBytes, -1);
  range.extend(4 * kPageBytes);
  range.data()[3 * kPageBytes] = std::byte{7};
  range.shrink(kPageBytes);
  EXPECT_EQ(range.nbytes(), kPageBytes);
  EXPECT_TRUE(is_there(range.data()));
  EXPECT_FALSE(is_there(range.data() + 3 * kPageBytes));
  range.extend(4 * kPageBytes);
  EXPECT_EQ(range.data()[3 * kPageBytes], std::byte{0});
}

TEST(HostRange, is_not_there_in_a_forked_child) {
  HostRange range(kPageBytes, -1);
  range.extend(kPageBytes);
  const pid_t child = fork();
  if (child == 0) _exit(is_there(range.data()) ? 1 : 0);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(is_there(range.data()));
}

TEST(HostRange, asks_for_memory_of_its_node) {
  constexpr int kPreferred = 1;       // MPOL_PREFERRED
  constexpr unsigned kOfAddress = 2;  // MPOL_F_ADDR
  HostRange range(kHugePageBytes, 0);
  range.extend(kPageBytes);
  int policy = -1;
  unsigned long nodes[16] = {};
  if (syscall(SYS_get_mempolicy, &policy, nodes, 8 * sizeof nodes, range.data(), kOfAddress) != 0) {
    GTEST_SKIP() << "the kernel tells no policy here";
  }
  EXPECT_EQ(policy, kPreferred);
  EXPECT_EQ(nodes[0], 1u);
  HostRange anywhere(kHugePageBytes, -1);
  ASSERT_EQ(syscall(SYS_get_mempolicy, &policy, nodes, 8 * sizeof nodes, anywhere.data(), kOfAddress), 0);
  EXPECT_EQ(policy, 0);
}

TEST(NumaNode, is_the_one_that_the_kernel_knows_for_the_device) {
  const test::TestDirectory directory;
  for (const auto& [address, node] : {std::pair("0000:1b:00.0", "1\n"), std::pair("0000:1c:00.0", "-1\n")}) {
    std::filesystem::create_directory(directory.path() + "/" + address);
    std::ofstream(directory.path() + "/" + address + "/numa_node") << node;
  }
  EXPECT_EQ(numa_node_of("0000:1B:00.0", directory.path()), 1);
  EXPECT_EQ(numa_node_of("0000:1C:00.0", directory.path()), -1);
  EXPECT_EQ(numa_node_of("0000:1D:00.0", directory.path()), -1);
  EXPECT_EQ(numa_node_of("", directory.path()), -1);
}

}  // namespace
}  // namespace lmswap
