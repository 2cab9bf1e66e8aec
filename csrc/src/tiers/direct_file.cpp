#include "lmswap/tiers/direct_file.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace lmswap {
namespace {

bool is_page_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kPageBytes == 0; }

}  // namespace

DirectFile::DirectFile(const SwapDirectory& directory, uint64_t nbytes, std::shared_ptr<Faults> faults)
    : SwapFile(directory, O_DIRECT, nbytes, std::move(faults)) {}

void DirectFile::write(uint64_t offset, const std::byte* source, uint64_t nbytes, Scratch scratch) {
  if (is_page_aligned(source)) {
    const uint64_t whole = nbytes / kPageBytes * kPageBytes;
    write_file(offset, source, whole);
    offset += whole, source += whole, nbytes -= whole;
  }
  while (nbytes > 0) {
    const uint64_t part = std::min<uint64_t>(nbytes, scratch.size());
    std::memcpy(scratch.data(), source, part);
    std::memset(scratch.data() + part, 0, round_to_pages(part) - part);
    write_file(offset, scratch.data(), round_to_pages(part));
    offset += part, source += part, nbytes -= part;
  }
}

void DirectFile::read(uint64_t offset, std::byte* target, uint64_t nbytes, Scratch scratch) {
  if (is_page_aligned(target)) {
    const uint64_t whole = nbytes / kPageBytes * kPageBytes;
    read_file(offset, target, whole);
    offset += whole, target += whole, nbytes -= whole;
  }
  while (nbytes > 0) {
    const uint64_t part = std::min<uint64_t>(nbytes, scratch.size());
    read_file(offset, scratch.data(), round_to_pages(part));
    std::memcpy(target, scratch.data(), part);
    offset += part, target += part, nbytes -= part;
  }
}

}  // namespace lmswap
