#include "lmswap/heap/interpose.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "lmswap/error.h"
#include "lmswap/heap/bindings.h"

namespace lmswap::heap::interpose_test {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kThreshold = 64 * 1024;

struct Client {
  explicit Client(const char* path) : library(dlopen(path, RTLD_LAZY | RTLD_LOCAL)) {
    if (library == nullptr) throw std::runtime_error(dlerror());
    allocate = reinterpret_cast<void* (*)(size_t, size_t)>(dlsym(library, "client_allocate"));
    free = reinterpret_cast<void (*)(void*)>(dlsym(library, "client_free"));
    create = reinterpret_cast<char* (*)(size_t)>(dlsym(library, "client_new"));
    destroy = reinterpret_cast<void (*)(const char*)>(dlsym(library, "client_delete"));
  }
  void* library;
  void* (*allocate)(size_t alignment, size_t nbytes);
  void (*free)(void* block);
  char* (*create)(size_t nbytes);
  void (*destroy)(const char* block);
};

bool is_served(const void* block) { return owns(reinterpret_cast<uintptr_t>(block)); }

std::string file_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

class Interposer : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { install(kThreshold, {file_name(GetParam())}); }
  void TearDown() override {
    uninstall();
    EXPECT_EQ(stats().live_bytes, 0u) << "a test left a block behind";
  }
  Client client_{GetParam()};
};

TEST_P(Interposer, ServesFromTheThresholdOn) {
  void* const large = client_.allocate(64, kThreshold);
  void* const small = client_.allocate(64, kThreshold - 1);
  void* const aligned = client_.allocate(2 * kMiB, 2 * kMiB);
  EXPECT_TRUE(is_served(large));
  EXPECT_FALSE(is_served(small));
  EXPECT_FALSE(is_served(aligned)) << "alignments above a page are the C library's";
  EXPECT_EQ(stats().live_bytes, kThreshold);
  for (void* const block : {large, small, aligned}) client_.free(block);
  client_.free(nullptr);
  EXPECT_EQ(stats().retained_bytes, kThreshold);
}

TEST_P(Interposer, ServesOperatorNewUnlessAnotherAllocatorHasReplacedIt) {
  Dl_info info{};
  ASSERT_NE(dladdr(dlsym(RTLD_DEFAULT, "_Znam"), &info), 0);
  const bool is_replaced = file_name(info.dli_fname) != "libstdc++.so.6";  // as sanitizers do
  const char* const before = client_.create(kThreshold - 1);
  const char* const large = client_.create(kThreshold);
  EXPECT_FALSE(is_served(before));
  EXPECT_EQ(is_served(large), !is_replaced);
  client_.destroy(before);
  client_.destroy(large);
  delete[] client_.create(kMiB);  // as a library that is not served does with what it was given
}

TEST_P(Interposer, InstallingAgainChangesOnlyTheThreshold) {
  void* const before = client_.allocate(64, kMiB);
  install(2 * kMiB, {file_name(GetParam())});
  void* const after = client_.allocate(64, kMiB);
  EXPECT_TRUE(is_served(before));
  EXPECT_FALSE(is_served(after));
  client_.free(before);
  client_.free(after);
}

TEST_P(Interposer, BlocksOutliveUninstallAndLeaveNothing) {
  auto* const block = static_cast<char*>(client_.allocate(64, kMiB));
  std::memset(block, 7, kMiB);
  client_.free(client_.allocate(64, kMiB));
  uninstall();
  EXPECT_FALSE(is_installed());
  EXPECT_EQ(stats().retained_bytes, 0u);
  EXPECT_EQ(block[kMiB - 1], 7);
  void* const later = client_.allocate(64, kMiB);
  EXPECT_FALSE(is_served(later));
  client_.free(later);
  client_.free(block);
  EXPECT_EQ(stats().live_bytes + stats().retained_bytes, 0u);
}

TEST_P(Interposer, AForkedChildReadsLiveBlocksDropsRetainedOnesAndAllocates) {
  auto* const live = static_cast<char*>(client_.allocate(64, kMiB));
  std::memset(live, 7, kMiB);
  client_.free(client_.allocate(64, kMiB));
  const pid_t child = fork();
  if (child == 0) {
    const bool is_dropped = stats().retained_bytes == 0 && stats().live_bytes == kMiB;
    void* const fresh = client_.allocate(64, kMiB);
    const bool is_usable = is_served(fresh) && live[kMiB - 1] == 7;
    client_.free(fresh);
    client_.free(live);
    std::_Exit(is_dropped && is_usable ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(stats().retained_bytes, kMiB) << "the parent keeps its own";
  client_.free(live);
}

TEST_P(Interposer, RefusesBadArgumentsWithAReason) {
  EXPECT_THROW(install(0, {file_name(GetParam())}), Error);
  EXPECT_THROW(install(kThreshold, {}), Error);
  EXPECT_THROW(install(kThreshold, {"libnot_loaded.so"}), Error);
  EXPECT_THROW(install(kThreshold, {"libgcc_s.so.1"}), Error) << "calls no posix_memalign";
}

// The torch of a platform where its CPU allocator is not built on posix_memalign.
struct Allocator {
  void* const library = dlopen(LMSWAP_HEAP_ALLOCATOR, RTLD_LAZY | RTLD_LOCAL);
  void* (*const allocate)(size_t) = reinterpret_cast<void* (*)(size_t)>(dlsym(library, "allocator_allocate"));
  void (*const free)(void*) = reinterpret_cast<void (*)(void*)>(dlsym(library, "allocator_free"));
};

class InterposedAllocator : public testing::Test {
 protected:
  void SetUp() override { install(kThreshold, {file_name(LMSWAP_HEAP_ALLOCATOR)}); }
  void TearDown() override {
    uninstall();
    EXPECT_EQ(stats().live_bytes, 0u) << "a test left a block behind";
  }
  Allocator allocator_;
};

TEST_F(InterposedAllocator, ServesLargeBlocksAndLeavesOthersToTheAllocator) {
  void* const large = allocator_.allocate(kThreshold);
  void* const small = allocator_.allocate(kThreshold - 1);
  EXPECT_TRUE(is_served(large));
  EXPECT_FALSE(is_served(small));
  allocator_.free(large);
  allocator_.free(small);
  allocator_.free(nullptr);
}

TEST_F(InterposedAllocator, BlocksOfBeforeAndAfterReturnToWhereTheyCameFrom) {
  void* const served = allocator_.allocate(kMiB);
  uninstall();
  void* const own = allocator_.allocate(kMiB);
  EXPECT_FALSE(is_served(own));
  install(kThreshold, {file_name(LMSWAP_HEAP_ALLOCATOR)});
  allocator_.free(own);
  allocator_.free(served);
}

TEST_F(InterposedAllocator, IsNotReplacedWhileItFillsItsMemory) {
  auto* const fills = static_cast<bool*>(dlsym(allocator_.library, "FLAGS_caffe2_cpu_allocator_do_zero_fill"));
  *fills = true;
  auto* const block = static_cast<char*>(allocator_.allocate(kMiB));
  *fills = false;
  EXPECT_FALSE(is_served(block));
  EXPECT_EQ(block[kMiB - 1], 0);
  allocator_.free(block);
}

// As a memory profiler does it that begins, or ends, while blocks of the heap are live.
int num_blocks_profiled = 0;
void profiled_free(void* block) {
  ++num_blocks_profiled;
  ::free(block);
}

TEST_P(Interposer, AProfilerThatPatchesTheSameBindingsGetsNoBlockOfTheHeap) {
  const Allocator tensors;
  install(kThreshold, {file_name(GetParam()), file_name(LMSWAP_HEAP_ALLOCATOR)});
  void* const live = client_.allocate(64, kMiB);
  ASSERT_TRUE(is_served(live));
  for (const Binding& binding : Library::find(file_name(GetParam())).bindings_of("free"))
    binding.write(reinterpret_cast<uintptr_t>(&profiled_free));
  tensors.free(tensors.allocate(64));
  client_.free(live);
  EXPECT_EQ(num_blocks_profiled, 0);
  void* const later = client_.allocate(64, kMiB);
  EXPECT_TRUE(is_served(later));
  client_.free(later);
}

INSTANTIATE_TEST_SUITE_P(Bound, Interposer, testing::Values(LMSWAP_HEAP_CLIENT_LAZY, LMSWAP_HEAP_CLIENT_NOW),
                         [](const auto& client) { return client.index == 0 ? "Lazily" : "AtLoadTime"; });

}  // namespace
}  // namespace lmswap::heap::interpose_test
