#include "lmswap/tiers/direct_file.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "lmswap/error.h"

namespace lmswap {
namespace {

Error tier_error(const std::string& directory, const std::string& text) {
  return Error(ErrorKind::kTier, "disk tier in '" + directory + "': " + text);
}

std::string room_text(int descriptor) {
  struct statvfs room;
  if (fstatvfs(descriptor, &room) != 0) return "unknown";
  return format_bytes(static_cast<uint64_t>(room.f_bavail) * room.f_frsize);
}

bool is_page_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kPageBytes == 0; }

}  // namespace

DirectFile::DirectFile(const SwapDirectory& directory, uint64_t nbytes, std::shared_ptr<Faults> faults)
    : IoStorage(nbytes), faults_(std::move(faults)), descriptor_(directory.open_unnamed()) {
  if (descriptor_ < 0) throw tier_error(directory.path(), "no file can be made there: " + errno_text(errno));
  int code = 0;
  if (faults_->next_after_delay("reserve").fail) {
    code = ENOSPC;
  } else if (fallocate(descriptor_, 0, 0, static_cast<off_t>(nbytes)) != 0) {
    code = errno;
  }
  if (code == 0) return;
  const std::string room = room_text(descriptor_);
  close(descriptor_);
  throw tier_error(directory.path(), "cannot reserve " + format_bytes(nbytes) + ": " + errno_text(code) +
                                         "; free there: " + room + ". Make room or name another directory");
}

DirectFile::~DirectFile() { close(descriptor_); }

void DirectFile::write(uint64_t offset, const std::byte* source, uint64_t nbytes, Bounce bounce) {
  if (is_page_aligned(source)) {
    const uint64_t whole = nbytes / kPageBytes * kPageBytes;
    write_pages(offset, source, whole);
    offset += whole, source += whole, nbytes -= whole;
  }
  while (nbytes > 0) {
    const uint64_t part = std::min<uint64_t>(nbytes, bounce.size());
    std::memcpy(bounce.data(), source, part);
    std::memset(bounce.data() + part, 0, round_to_pages(part) - part);
    write_pages(offset, bounce.data(), round_to_pages(part));
    offset += part, source += part, nbytes -= part;
  }
}

void DirectFile::read(uint64_t offset, std::byte* target, uint64_t nbytes, Bounce bounce) {
  if (is_page_aligned(target)) {
    const uint64_t whole = nbytes / kPageBytes * kPageBytes;
    read_pages(offset, target, whole);
    offset += whole, target += whole, nbytes -= whole;
  }
  while (nbytes > 0) {
    const uint64_t part = std::min<uint64_t>(nbytes, bounce.size());
    read_pages(offset, bounce.data(), round_to_pages(part));
    std::memcpy(target, bounce.data(), part);
    offset += part, target += part, nbytes -= part;
  }
}

void DirectFile::read_back(uint64_t offset, std::byte* target, uint64_t nbytes) {
  read_pages(offset, target, round_to_pages(nbytes));
}

void DirectFile::fill(uint64_t offset, uint64_t nbytes, std::byte value) {
  constexpr uint64_t kMostBytes = 4 << 20;  // at once, as the I/O pool's requests
  nbytes = round_to_pages(nbytes);
  const uint64_t part_bytes = std::min(nbytes, kMostBytes);
  const std::unique_ptr<void, void (*)(void*)> pages(std::aligned_alloc(kPageBytes, part_bytes), std::free);
  if (!pages) throw std::bad_alloc();
  std::memset(pages.get(), std::to_integer<int>(value), part_bytes);
  for (uint64_t begin = 0; begin < nbytes; begin += part_bytes) {
    write_pages(offset + begin, static_cast<const std::byte*>(pages.get()), std::min(part_bytes, nbytes - begin));
  }
}

void DirectFile::write_pages(uint64_t offset, const std::byte* source, uint64_t nbytes) {
  move_all("disk", "write", offset, nbytes, *faults_, [&](uint64_t done, uint64_t asked, const Fault&) {
    return pwrite(descriptor_, source + done, asked, static_cast<off_t>(offset + done));
  });
}

void DirectFile::read_pages(uint64_t offset, std::byte* target, uint64_t nbytes) {
  move_all("disk", "read", offset, nbytes, *faults_, [&](uint64_t done, uint64_t asked, const Fault& fault) {
    const ssize_t moved = pread(descriptor_, target + done, asked, static_cast<off_t>(offset + done));
    if (moved > 0 && fault.flips) target[done] ^= std::byte{0x80};
    return moved;
  });
}

}  // namespace lmswap
