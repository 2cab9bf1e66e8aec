#include "lmswap/tiers/compressed_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "lmswap/error.h"
#include "lmswap/limits.h"
#include "lmswap/tiers/float_codec.h"

namespace lmswap {
namespace {

constexpr uint32_t kRaw = 0, kFilled = 1 << 30;

// Not executable, as some systems require (vm.memfd_noexec); kernels before 6.3 do not know the flag.
int open_memory() {
  constexpr unsigned kNoExecution = 8;  // MFD_NOEXEC_SEAL of linux/memfd.h
  const int descriptor = memfd_create("lmswap", MFD_CLOEXEC | kNoExecution);
  return descriptor >= 0 || errno != EINVAL ? descriptor : memfd_create("lmswap", MFD_CLOEXEC);
}

std::string advice_on(int code, uint64_t nbytes) {
  switch (code) {
    case EFBIG:
      return file_size_advice(nbytes);
    case EACCES:
    case EPERM:
    case ENOSYS:
      return "This system allows no files in memory (memfd_create): allow them, or take another tier";
    case EMFILE:
    case ENFILE:
      return "Too many files are open: close some, or raise the limit (ulimit -n)";
    default:
      return "Free host memory, or swap less: a larger budget";
  }
}

CodecMemory codec_memory(Scratch scratch) { return scratch.first<kCodecBytes>(); }

// Calls `run(offset, done, nbytes)` for each chunk.
template <typename Run>
void for_chunks(uint64_t offset, uint64_t nbytes, Run run) {
  for (uint64_t done = 0; done < nbytes; done += kChunkBytes) {
    run(offset + done, done, std::min(kChunkBytes, nbytes - done));
  }
}

}  // namespace

void Residency::change(uint64_t before_bytes, uint64_t after_bytes) {
  const std::lock_guard lock(mutex_);
  now_bytes_ += after_bytes - before_bytes;
  peak_bytes_ = std::max(peak_bytes_, now_bytes_);
}

uint64_t Residency::now_bytes() const {
  const std::lock_guard lock(mutex_);
  return now_bytes_;
}

uint64_t Residency::peak_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_bytes_;
}

CompressedMemory::CompressedMemory(uint64_t nbytes, std::shared_ptr<Faults> faults,
                                   std::shared_ptr<Residency> residency)
    : IoStorage("compressed", nbytes, open_memory(), std::move(faults)),
      residency_(std::move(residency)),
      contents_(round_to_pages(nbytes) / kPageBytes, kFilled) {
  int code = 0;
  if (this->faults().next_after_delay("reserve").fail) {
    code = ENOMEM;
  } else if (descriptor() < 0 || ftruncate(descriptor(), static_cast<off_t>(round_to_pages(nbytes))) != 0) {
    code = errno;
  }
  if (code == 0) return;
  throw TierError("compressed tier: " + format_bytes(nbytes) + " of memory cannot be had: " + errno_text(code) + ". " +
                  advice_on(code, nbytes));
}

CompressedMemory::~CompressedMemory() { residency_->change(resident_bytes_, 0); }

void CompressedMemory::write(uint64_t offset, const std::byte* source, uint64_t nbytes, Scratch scratch) {
  for_chunks(offset, nbytes,
             [&](uint64_t at, uint64_t done, uint64_t part) { write_chunk(at, source + done, part, scratch); });
  count_pages();
}

void CompressedMemory::read(uint64_t offset, std::byte* target, uint64_t nbytes, Scratch scratch) {
  for_chunks(offset, nbytes,
             [&](uint64_t at, uint64_t done, uint64_t part) { read_chunk(at, target + done, part, scratch); });
}

void CompressedMemory::write_chunk(uint64_t offset, const std::byte* source, uint64_t nbytes, Scratch scratch) {
  const std::optional<uint64_t> encoded_bytes = encode(source, nbytes, codec_memory(scratch));
  uint32_t& content = contents_[offset / kPageBytes];
  if (!encoded_bytes) {
    content = kRaw;
    return write_file(offset, source, nbytes);
  }
  content = static_cast<uint32_t>(*encoded_bytes);
  write_file(offset, scratch.data(), *encoded_bytes);
  // Frees pages of earlier contents, whose chunks may have begun at other offsets: 2 microseconds where there are none.
  // A failure only leaves pages allocated.
  const uint64_t used_bytes = round_to_pages(*encoded_bytes);
  fallocate(descriptor(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset + used_bytes),
            static_cast<off_t>(round_to_pages(nbytes) - used_bytes));
}

void CompressedMemory::read_chunk(uint64_t offset, std::byte* target, uint64_t nbytes, Scratch scratch) {
  const uint32_t content = contents_[offset / kPageBytes];
  if (content == kRaw) return read_file(offset, target, nbytes);
  if (content >= kFilled) {
    std::memset(target, static_cast<int>(content - kFilled), nbytes);
    return;
  }
  read_file(offset, scratch.data(), content);
  if (decode(target, nbytes, codec_memory(scratch), content)) return;
  throw TransferError("compressed tier: what lies at offset " + std::to_string(offset) +
                      " is not what was written there. Main memory may be faulty");
}

void CompressedMemory::read_back(uint64_t offset, std::byte* target, uint64_t nbytes) {
  const std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(kPageBytes, kCodecBytes), std::free);
  if (!memory) throw std::bad_alloc();
  const Scratch scratch(static_cast<std::byte*>(memory.get()), kCodecBytes);
  read(offset, target, nbytes, scratch);
  explicit_bzero(scratch.data(), scratch.size());  // as in IoPool
}

// Chunks need not begin at the offsets of earlier ones, so all existing pages are overwritten.
void CompressedMemory::fill(uint64_t offset, uint64_t nbytes, std::byte value) {
  const std::vector<std::byte> values(kChunkBytes, value);
  const auto end = static_cast<off_t>(offset + round_to_pages(nbytes));
  for (off_t begin = static_cast<off_t>(offset); begin < end;) {
    begin = lseek(descriptor(), begin, SEEK_DATA);
    if (begin < 0 || begin >= end) break;
    const off_t hole = std::min(lseek(descriptor(), begin, SEEK_HOLE), end);
    for (; begin < hole; begin += static_cast<off_t>(kChunkBytes)) {
      write_file(static_cast<uint64_t>(begin), values.data(),
                 std::min(kChunkBytes, static_cast<uint64_t>(hole - begin)));
    }
    begin = hole;
  }
  const auto first = contents_.begin() + static_cast<std::ptrdiff_t>(offset / kPageBytes);
  std::fill_n(first, round_to_pages(nbytes) / kPageBytes, kFilled + std::to_integer<uint32_t>(value));
}

void CompressedMemory::count_pages() {
  constexpr uint64_t kBlockBytes = 512;  // the unit of st_blocks
  struct stat status;
  const std::lock_guard lock(mutex_);
  if (fstat(descriptor(), &status) != 0) return;
  const uint64_t now_bytes = static_cast<uint64_t>(status.st_blocks) * kBlockBytes;
  residency_->change(resident_bytes_, now_bytes);
  resident_bytes_ = now_bytes;
}

}  // namespace lmswap
