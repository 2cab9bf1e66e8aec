#include "lmswap/tiers/mapped_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "lmswap/error.h"
#include "lmswap/limits.h"

namespace lmswap {
namespace {

struct Mapping {
  void* data;
  uint64_t nbytes;
  int descriptor;
  bool is_private;  // a parent's, whose pages may hold what this process wrote
};

// Nothing is allocated or freed while the mutex is held: allocators have locks of their own across forks.
struct Mappings {
  std::mutex mutex;
  std::list<Mapping> all;
  bool are_trimmed = false;  // a thread bounds their resident pages
};

// What the caller may map by in-place access before it is trimmed, beside what it maps within an interval: a norm of
// all gradients reads 12 GB/s. The intervals are those after a trim, and after none.
constexpr uint64_t kMaxMappedBytes = 1 << 20;
constexpr auto kBusyInterval = std::chrono::microseconds(200), kIdleInterval = std::chrono::microseconds(1000);

Mappings& mappings() {
  static auto& found = *new Mappings;  // for files that outlive static objects
  return found;
}

// Resident pages of files; 0 if the system does not say.
uint64_t file_pages(int statm) noexcept {
  char text[128] = {};
  if (pread(statm, text, sizeof text - 1, 0) <= 0) return 0;
  char* next = text;
  std::strtoull(next, &next, 10);  // mapped, then resident ones
  std::strtoull(next, &next, 10);
  return std::strtoull(next, nullptr, 10);
}

// Lets the calling thread run soon after it wakes, though others compute on all cores: of threads that wait, the
// scheduler prefers those with short slices (since Linux 6.12; others ignore it). glibc has no declaration before 2.41.
void request_short_slices() noexcept {
  struct {
    uint32_t size = 48, policy = 0;
    uint64_t flags = 0;
    int32_t nice = 0;
    uint32_t priority = 0;
    uint64_t slice_ns = 100'000, deadline = 0, period = 0;
  } attributes;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

// Ends with the last mapping.
void trim_while_mapped() noexcept {
  request_short_slices();
  const int statm = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  const uint64_t max_pages = kMaxMappedBytes / static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  uint64_t others = 0;  // pages that trimming leaves
  for (bool is_over = false;; std::this_thread::sleep_for(is_over ? kBusyInterval : kIdleInterval)) {
    is_over = file_pages(statm) > others + max_pages;
    const std::lock_guard guard(mappings().mutex);
    if (mappings().all.empty()) {
      mappings().are_trimmed = false;
      break;
    }
    if (!is_over) continue;
    for (const Mapping& mapping : mappings().all) {
      if (!mapping.is_private) madvise(mapping.data, mapping.nbytes, MADV_DONTNEED);
    }
    others = file_pages(statm);
  }
  if (statm >= 0) close(statm);
}

void make_private() noexcept {
  mappings().are_trimmed = false;  // the thread is the parent's
  for (Mapping& mapping : mappings().all) {
    if (std::exchange(mapping.is_private, true)) continue;
    constexpr int kFlags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    if (mmap(mapping.data, mapping.nbytes, PROT_READ | PROT_WRITE, kFlags, mapping.descriptor, 0) == MAP_FAILED) {
      constexpr std::string_view kText = "lmswap: a forked process shares host copies with its parent: mmap failed\n";
      static_cast<void>(!write(STDERR_FILENO, kText.data(), kText.size()));
    }
  }
  mappings().mutex.unlock();
}

[[maybe_unused]] const int kIsPrivateInChildren =
    pthread_atfork([] { mappings().mutex.lock(); }, [] { mappings().mutex.unlock(); }, make_private);

}  // namespace

MappedFile::MappedFile(const SwapDirectory& directory, uint64_t nbytes, std::shared_ptr<Faults> faults)
    : SwapFile(directory, 0, nbytes, std::move(faults)) {
  keep_for_children();
  std::list<Mapping> made(1);
  void* const mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor(), 0);
  if (mapped == MAP_FAILED) {
    throw directory_error(directory.path(), "cannot map " + format_bytes(nbytes) + ": " + errno_text(errno) +
                                                ". Raise the limit on the process's addresses (ulimit -v) or mappings "
                                                "(sysctl vm.max_map_count)");
  }
  data_ = static_cast<std::byte*>(mapped);
  made.front() = {mapped, nbytes, descriptor(), false};
  bool are_trimmed = false;
  {
    const std::lock_guard guard(mappings().mutex);
    mappings().all.splice(mappings().all.begin(), made);
    are_trimmed = std::exchange(mappings().are_trimmed, true);
  }
  try {
    if (!are_trimmed) start_thread<TierError>("a thread that trims mapped pages", trim_while_mapped).detach();
  } catch (...) {
    unmap();
    throw;
  }
}

MappedFile::~MappedFile() { unmap(); }

void MappedFile::unmap() noexcept {
  std::list<Mapping> removed;
  {
    const std::lock_guard guard(mappings().mutex);
    auto& all = mappings().all;
    const auto is_this = [&](const Mapping& mapping) { return mapping.data == data_; };
    removed.splice(removed.begin(), all, std::find_if(all.begin(), all.end(), is_this));
    munmap(data_, this->nbytes());  // while no fork would map it again
  }
}

void MappedFile::write(uint64_t offset, const std::byte* source, uint64_t nbytes, Scratch) {
  write_file(offset, source, nbytes);
}

void MappedFile::read(uint64_t offset, std::byte* target, uint64_t nbytes, Scratch) {
  read_file(offset, target, nbytes);
}

}  // namespace lmswap
