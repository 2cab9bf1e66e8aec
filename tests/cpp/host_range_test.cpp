// The origin of pinned memory, and its fixed address.
#include "lmswap/tiers/host_range.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <thread>

#include "failing_system.h"
#include "lmswap/tiers/arena.h"
#include "test_device.h"

namespace lmswap::host_range_test {
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
  EXPECT_ERROR(range.extend(4 * kPageBytes + 1), DriverError, "20480");
  EXPECT_ERROR(HostRange(uint64_t{1} << 62, -1), DriverError, "mmap of");
}

TEST(HostRange, releases_memory_from_its_end) {
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

TEST(HostRange, requests_memory_of_its_node) {
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

// What a mapping's protection is changed by must begin on a page of the kernel's, which may be larger than ours.
TEST(HostRange, uses_the_page_size_of_the_kernel) {
  constexpr uint64_t kPage = 64 << 10;
  HostRange range(uint64_t{64} << 20, -1, kPage);
  uint64_t before = 0;
  for (const uint64_t nbytes :
       {uint64_t{5} << 20 | kPageBytes, uint64_t{5} << 20 | (3 * kPageBytes), uint64_t{9} << 20}) {
    range.extend(nbytes);
    EXPECT_EQ(range.nbytes() % kPage, 0u);
    EXPECT_GE(range.nbytes(), nbytes);
    EXPECT_LT(range.nbytes(), nbytes + kPage);
    for (uint64_t at = before; at < range.nbytes(); at += kPageBytes) ASSERT_TRUE(is_there(range.data() + at)) << at;
    before = range.nbytes();
  }
  range.shrink(kPageBytes);
  EXPECT_EQ(range.nbytes(), kPage);
  EXPECT_TRUE(is_there(range.data() + kPage - kPageBytes));
  EXPECT_FALSE(is_there(range.data() + kPage));
}

// For this thread and those that it starts, as Docker's default profile does it for a container.
bool refuse_mbind() {
  sock_filter program[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                           BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mbind, 0, 1),
                           BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                           BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter{4, program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

class RefusedNode : public testing::Test {
 protected:
  // Where the threads were bound to that put memory there, from the node whose CPUs are these; what was said of it.
  std::vector<cpu_set_t> extend(const std::string& cpus) {
    std::filesystem::create_directories(nodes_.path() + "/node1");
    std::ofstream(nodes_.path() + "/node1/cpulist") << cpus << "\n";
    test::take_bindings();
    testing::internal::CaptureStderr();
    std::thread([&] {
      is_refused_ = refuse_mbind();
      constexpr uint64_t kBytes = uint64_t{160} << 20;  // by several threads where there are several CPUs
      HostRange range(kBytes, 1, kPageBytes, nodes_.path());
      range.extend(kBytes);
      for (uint64_t at = 0; at < kBytes; at += kHugePageBytes) ASSERT_TRUE(is_there(range.data() + at)) << at;
    }).join();
    said_ = testing::internal::GetCapturedStderr();
    return test::take_bindings();
  }
  const test::TestDirectory nodes_;
  bool is_refused_ = false;
  std::string said_;
};

TEST_F(RefusedNode, is_where_the_threads_run_that_touch_the_memory_first) {
  const std::vector<cpu_set_t> bindings = extend("0,70-71");
  if (!is_refused_) GTEST_SKIP() << "no call can be refused here";
  ASSERT_FALSE(bindings.empty());
  for (const cpu_set_t& cpus : bindings) {
    EXPECT_EQ(CPU_COUNT(&cpus), 3);
    for (const size_t cpu : {0, 70, 71}) EXPECT_TRUE(CPU_ISSET(cpu, &cpus)) << cpu;
  }
  EXPECT_EQ(said_, "");
}

TEST_F(RefusedNode, without_allowed_threads_is_reported_once) {
  for (const char* cpus : {"1000", ""}) {  // there is no such CPU; the kernel does not say
    const bool is_first = std::string(cpus) != "";
    extend(cpus);
    if (!is_refused_) GTEST_SKIP() << "no call can be refused here";
    EXPECT_EQ(said_.find("Operation not permitted") != std::string::npos, is_first) << said_;
    EXPECT_EQ(said_.find("--cap-add SYS_NICE") != std::string::npos, is_first) << said_;
  }
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
}  // namespace lmswap::host_range_test
