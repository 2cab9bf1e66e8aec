#include "lmswap/tiers/direct_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/fsuid.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>

#include "failing_system.h"
#include "test_device.h"

namespace lmswap::test::direct_file_test {
namespace {

struct FreeDeleter {
  void operator()(std::byte* pointer) const { std::free(pointer); }
};
using Pages = std::unique_ptr<std::byte, FreeDeleter>;

Pages allocate_pages(uint64_t nbytes) {
  return Pages(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, round_to_pages(nbytes))));
}

constexpr uint64_t kScratchBytes = 4 * kPageBytes;

class DirectFileTest : public testing::Test {
 protected:
  // Writes and reads back, from and to memory that begins `shift` bytes after a page and is followed by other bytes.
  void expect_round_trip(DirectFile& file, uint64_t offset, uint64_t nbytes, uint64_t shift) {
    const test::Bytes bytes = make_bytes(nbytes, nbytes + shift);
    const Pages memory = allocate_pages(shift + nbytes + kPageBytes), scratch = allocate_pages(kScratchBytes);
    const Scratch bounce_span(scratch.get(), kScratchBytes);
    std::memcpy(memory.get() + shift, bytes.data(), nbytes);
    file.write(offset, memory.get() + shift, nbytes, bounce_span);
    std::memset(memory.get(), 0x5a, shift + nbytes + kPageBytes);
    file.read(offset, memory.get() + shift, nbytes, bounce_span);
    EXPECT_EQ(std::memcmp(memory.get() + shift, bytes.data(), nbytes), 0) << nbytes << " bytes, shift " << shift;
    for (uint64_t i = 0; i < shift; ++i) ASSERT_EQ(memory.get()[i], std::byte{0x5a}) << "before the bytes";
    for (uint64_t i = 0; i < kPageBytes; ++i) {
      ASSERT_EQ(memory.get()[shift + nbytes + i], std::byte{0x5a}) << "behind the bytes";
    }
  }

  // The file has no name: found among our descriptors by its size.
  static int find_file(off_t nbytes) {
    for (int descriptor = 3; descriptor < 256; ++descriptor) {
      if (lseek(descriptor, 0, SEEK_END) == nbytes && (fcntl(descriptor, F_GETFL) & O_DIRECT)) return descriptor;
    }
    return -1;
  }

  TestDirectory directory_;
};

TEST_F(DirectFileTest, restores_written_bytes_at_any_size_and_alignment) {
  DirectFile file(directory_.path(), 1 << 20, std::make_shared<Faults>(""));
  for (const uint64_t nbytes : {1, 511, 4095, 4096, 4097, 16384, 16385, 100000}) {
    for (const uint64_t shift : {0, 1, 64, 512}) expect_round_trip(file, 8 * kPageBytes, nbytes, shift);
  }
}

TEST_F(DirectFileTest, continues_short_reads_and_writes) {
  DirectFile file(directory_.path(), 1 << 20, std::make_shared<Faults>("write@*=short,read@*=short"));
  expect_round_trip(file, 0, 100000, 0);
}

TEST_F(DirectFileTest, leaves_no_name_and_no_room_behind) {
  {
    DirectFile file(directory_.path(), 1 << 20, std::make_shared<Faults>(""));
    EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

// As a data loader's worker has it open, which lives for longer than the file is used.
TEST_F(DirectFileTest, leaves_no_room_to_a_forked_child_that_has_it_open) {
  auto file = std::make_unique<DirectFile>(directory_.path(), 1 << 20, std::make_shared<Faults>(""));
  const int descriptor = find_file(1 << 20);
  struct stat before = {};
  ASSERT_EQ(fstat(descriptor, &before), 0);
  EXPECT_GE(before.st_blocks * 512, 1 << 20);
  int ended[2] = {};
  ASSERT_EQ(pipe(ended), 0);
  const pid_t child = fork();
  if (child == 0) {
    struct stat status = {};
    char byte = 0;
    close(ended[1]);
    const bool has_ended = read(ended[0], &byte, 1) == 0;
    _exit(has_ended && fstat(descriptor, &status) == 0 && status.st_blocks == 0 ? 0 : 1);
  }
  file.reset();
  close(ended[0]);
  close(ended[1]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST_F(DirectFileTest, is_left_alone_by_a_forked_child_that_ends_it) {
  auto file = std::make_unique<DirectFile>(directory_.path(), 1 << 20, std::make_shared<Faults>(""));
  const pid_t child = fork();
  if (child == 0) {
    file.reset();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  expect_round_trip(*file, 0, 1 << 20, 0);
}

TEST_F(DirectFileTest, is_written_in_place_where_the_filesystem_would_not_do_so) {
  test::num_overwritten_in_place = 0;
  const DirectFile file(directory_.path(), 1 << 20, std::make_shared<Faults>(""));
  EXPECT_EQ(test::num_overwritten_in_place, 1);
}

TEST_F(DirectFileTest, refuses_a_disk_whose_blocks_are_larger_than_a_page) {
  test::block_bytes = 2 * kPageBytes;
  EXPECT_ERROR(SwapDirectory{directory_.path()}, TierError, "blocks of more than 4096 bytes");
  test::block_bytes = 1;
  EXPECT_NO_THROW(SwapDirectory{directory_.path()});
}

TEST_F(DirectFileTest, reports_failing_reads_and_writes) {
  DirectFile file(directory_.path(), 1 << 20, std::make_shared<Faults>("write@1=fail,read@1=fail"));
  const Pages pages = allocate_pages(kPageBytes), scratch = allocate_pages(kScratchBytes);
  const Scratch bounce_span(scratch.get(), kScratchBytes);
  std::memset(pages.get(), 0, kPageBytes);
  EXPECT_ERROR(file.write(4096, pages.get(), kPageBytes, bounce_span), TransferError, "errno 5");
  EXPECT_ERROR(file.read(4096, pages.get(), kPageBytes, bounce_span), TransferError, "offset 4096");
  EXPECT_ERROR(file.read(1 << 20, pages.get(), kPageBytes, bounce_span), TransferError, "ends there");
}

TEST_F(DirectFileTest, reports_a_full_disk) {
  EXPECT_ERROR(DirectFile(directory_.path(), 1 << 20, std::make_shared<Faults>("reserve@1=fail")), TierError,
               "No space left");
  // For real: more than any disk has.
  EXPECT_ERROR(DirectFile(directory_.path(), uint64_t{1} << 60, std::make_shared<Faults>("")), TierError,
               "cannot reserve");
}

// What is said where the kernel refuses a reservation with the number.
std::string refusal(const std::string& directory, uint64_t nbytes, int code) {
  test::reservation_error = code;
  test::num_failing_reservations = code == 0 ? 0 : 1;
  try {
    const DirectFile file(directory, nbytes, std::make_shared<Faults>(""));
    return "";
  } catch (const Error& error) {
    EXPECT_NE(dynamic_cast<const TierError*>(&error), nullptr);
    return error.what();
  }
}

TEST_F(DirectFileTest, is_reserved_also_where_signals_interrupt_it) {
  test::reservation_error = EINTR;
  test::num_failing_reservations = 3;
  DirectFile file(directory_.path(), 1 << 20, std::make_shared<Faults>(""));
  EXPECT_EQ(test::num_failing_reservations, 0);
  expect_round_trip(file, 0, 1 << 20, 0);
}

TEST_F(DirectFileTest, reports_the_free_bytes_before_the_reservation) {
  constexpr uint64_t kBytes = 256 << 20;
  struct statvfs room = {};
  ASSERT_EQ(statvfs(directory_.path().c_str(), &room), 0);
  const uint64_t free_bytes = room.f_bavail * room.f_frsize;
  if (free_bytes < 2 * kBytes) GTEST_SKIP() << "the disk is about full";
  const std::string text = refusal(directory_.path(), kBytes, ENOSPC);
  const size_t at = text.find('(', text.find("free there: "));
  ASSERT_NE(at, std::string::npos) << text;
  EXPECT_GT(std::stoull(text.substr(at + 1)), free_bytes - kBytes / 2) << text;
  EXPECT_NE(text.find("Make room"), std::string::npos) << text;
}

TEST_F(DirectFileTest, names_the_limit_that_a_file_exceeds) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);  // as Python does
  const rlimit small{1 << 20, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string of_process = refusal(directory_.path(), 2 << 20, 0);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(of_process.find("at most 1.0 MiB (1048576 bytes): raise that limit (ulimit -f)"), std::string::npos)
      << of_process;
  const std::string of_filesystem = refusal(directory_.path(), 2 << 20, EFBIG);
  EXPECT_NE(of_filesystem.find("another filesystem"), std::string::npos) << of_filesystem;
  const std::string of_quota = refusal(directory_.path(), 2 << 20, EDQUOT);
  EXPECT_NE(of_quota.find("The quota there is used up"), std::string::npos) << of_quota;
  const std::string of_kind = refusal(directory_.path(), 2 << 20, EOPNOTSUPP);
  EXPECT_NE(of_kind.find("reserves no room"), std::string::npos) << of_kind;
  for (const std::string& text : {of_process, of_filesystem, of_kind}) {
    EXPECT_EQ(text.find("free there"), std::string::npos) << text;
  }
}

TEST_F(DirectFileTest, suggests_freeing_space_only_if_space_is_missing) {
  for (const int code : {EIO, EPERM, ENODEV, EROFS, ENXIO}) {
    const std::string text = refusal(directory_.path(), 2 << 20, code);
    EXPECT_EQ(text.find("oom"), std::string::npos) << text;
    EXPECT_NE(text.find("the kernel's log (dmesg)"), std::string::npos) << text;
  }
  EXPECT_NE(refusal(directory_.path(), 2 << 20, ENOSPC).find("Make room"), std::string::npos);
}

TEST_F(DirectFileTest, refuses_directories_that_cannot_serve) {
  EXPECT_NO_THROW(SwapDirectory{directory_.path()});
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
  EXPECT_ERROR(SwapDirectory(directory_.path() + "/missing"), TierError, "No such file");
  const std::string file = directory_.path() + "/file";
  close(open(file.c_str(), O_CREAT | O_WRONLY, 0600));
  EXPECT_ERROR(SwapDirectory{file}, TierError, "not a directory");
}

TEST_F(DirectFileTest, refuses_a_directory_that_is_memory) {
  if (!std::filesystem::is_directory("/dev/shm")) GTEST_SKIP() << "no /dev/shm here";
  EXPECT_ERROR(SwapDirectory{"/dev/shm"}, TierError, "tmpfs");
}

TEST_F(DirectFileTest, refuses_a_directory_that_cannot_be_written) {
  constexpr auto kReadable = std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec;
  std::filesystem::permissions(directory_.path(), kReadable | std::filesystem::perms::others_exec);
  const uid_t user = geteuid();
  if (user == 0) setfsuid(65534);  // root may write everywhere: use another user for this thread's files
  EXPECT_ERROR(SwapDirectory{directory_.path()}, TierError, "Permission denied");
  if (user == 0) setfsuid(user);
  std::filesystem::permissions(directory_.path(), std::filesystem::perms::owner_all);
}

TEST_F(DirectFileTest, bypasses_the_page_cache) {
  DirectFile file(directory_.path(), 1 << 20, std::make_shared<Faults>(""));
  expect_round_trip(file, 0, 1 << 20, 0);
  const int found = find_file(1 << 20);
  ASSERT_GE(found, 0);
  void* mapped = mmap(nullptr, 1 << 20, PROT_READ, MAP_SHARED, found, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  std::vector<unsigned char> resident((1 << 20) / kPageBytes);
  ASSERT_EQ(mincore(mapped, 1 << 20, resident.data()), 0);
  munmap(mapped, 1 << 20);
  int num_resident = 0;
  for (const unsigned char page : resident) num_resident += page & 1;
  EXPECT_EQ(num_resident, 0);
}

}  // namespace
}  // namespace lmswap::test::direct_file_test
