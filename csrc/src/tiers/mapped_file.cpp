#include "lmswap/tiers/mapped_file.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <list>
#include <mutex>
#include <string_view>
#include <utility>

#include "lmswap/error.h"

namespace lmswap {
namespace {

struct Mapping {
  void* data;
  uint64_t nbytes;
  int descriptor;
};

// Nothing is allocated or freed while the mutex is held: allocators have locks of their own across forks.
struct Mappings {
  std::mutex mutex;
  std::list<Mapping> all;
};

Mappings& mappings() {
  static auto& found = *new Mappings;  // for files that outlive static objects
  return found;
}

void make_private() noexcept {
  for (const Mapping& mapping : mappings().all) {
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
  made.front() = {mapped, nbytes, descriptor()};
  const std::lock_guard guard(mappings().mutex);
  mappings().all.splice(mappings().all.begin(), made);
}

MappedFile::~MappedFile() {
  std::list<Mapping> removed;
  {
    const std::lock_guard guard(mappings().mutex);
    auto& all = mappings().all;
    const auto is_this = [&](const Mapping& mapping) { return mapping.data == data_; };
    removed.splice(removed.begin(), all, std::find_if(all.begin(), all.end(), is_this));
    munmap(data_, this->nbytes());  // while no fork would map it again
  }
}

// The bytes stay in the page cache. Locked memory (mlockall) is refused, and stays mapped.
void MappedFile::trim() noexcept { madvise(data_, nbytes(), MADV_DONTNEED); }

void MappedFile::write(uint64_t offset, const std::byte* source, uint64_t nbytes, Scratch) {
  write_file(offset, source, nbytes);
}

void MappedFile::read(uint64_t offset, std::byte* target, uint64_t nbytes, Scratch) {
  read_file(offset, target, nbytes);
}

}  // namespace lmswap
