#include "lmswap/tiers/mapped_file.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "lmswap/error.h"

namespace lmswap {

MappedFile::MappedFile(const SwapDirectory& directory, uint64_t nbytes, std::shared_ptr<Faults> faults)
    : SwapFile(directory, 0, nbytes, std::move(faults)) {
  void* const mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor(), 0);
  if (mapped == MAP_FAILED) {
    throw directory_error(directory.path(), "cannot map " + format_bytes(nbytes) + ": " + errno_text(errno) +
                                                ". Raise the limit on the process's addresses (ulimit -v) or mappings "
                                                "(sysctl vm.max_map_count)");
  }
  data_ = static_cast<std::byte*>(mapped);
}

MappedFile::~MappedFile() { munmap(data_, nbytes()); }

// The bytes stay in the page cache. Locked memory (mlockall) is refused, and stays mapped.
void MappedFile::trim() noexcept { madvise(data_, nbytes(), MADV_DONTNEED); }

void MappedFile::write(uint64_t offset, const std::byte* source, uint64_t nbytes, Scratch) {
  write_file(offset, source, nbytes);
}

void MappedFile::read(uint64_t offset, std::byte* target, uint64_t nbytes, Scratch) {
  read_file(offset, target, nbytes);
}

}  // namespace lmswap
