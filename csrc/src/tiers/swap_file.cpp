#include "lmswap/tiers/swap_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "lmswap/error.h"
#include "lmswap/limits.h"

namespace lmswap {
namespace {

std::string room_text(int descriptor) {
  struct statvfs room;
  if (fstatvfs(descriptor, &room) != 0) return "unknown";
  return format_bytes(static_cast<uint64_t>(room.f_bavail) * room.f_frsize);
}

// On a copy-on-write filesystem (btrfs) only the first write would use the reserved space, and a full disk would be an
// error in the middle of a step. Must be set on an empty file; other filesystems do not know the flag, or ignore it.
void overwrite_in_place(int descriptor) {
  int flags = 0;
  if (ioctl(descriptor, FS_IOC_GETFLAGS, &flags) != 0) return;
  flags |= FS_NOCOW_FL;
  static_cast<void>(ioctl(descriptor, FS_IOC_SETFLAGS, &flags));
}

// Repeated until complete: signals interrupt it, of a profiler for example. What is reserved by then stays reserved.
int reserve(int descriptor, uint64_t nbytes) {
  while (fallocate(descriptor, 0, 0, static_cast<off_t>(nbytes)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

// The cause of a failed reservation, and what to do.
std::string advice_on(int code, uint64_t nbytes, const std::string& room) {
  switch (code) {
    case EFBIG:
      return ". " + file_size_advice(nbytes);
    case EDQUOT:
      return ". The quota there is used up, of a disk with " + room +
             " free: make room within it, have it raised, or name another directory";
    case EOPNOTSUPP:
      return ". The filesystem there reserves no room for files: name a directory of another one";
    case ENOSPC:
      return "; free there: " + room + ". Make room or name another directory";
    default:
      return ". The disk or its filesystem may be faulty: look into the kernel's log (dmesg), or name another "
             "directory";
  }
}

}  // namespace

SwapFile::SwapFile(const SwapDirectory& directory, int access, uint64_t nbytes, std::shared_ptr<Faults> faults)
    : IoStorage("disk", nbytes, directory.open_unnamed(access), std::move(faults)) {
  if (descriptor() < 0) throw directory_error(directory.path(), "no file can be made there: " + errno_text(errno));
  const std::string room = room_text(descriptor());  // queried before a failing reservation uses it up
  const bool is_full = this->faults().next_after_delay("reserve").fail;
  overwrite_in_place(descriptor());
  const int code = is_full ? ENOSPC : reserve(descriptor(), nbytes);
  if (code == 0) return;
  throw directory_error(directory.path(), "cannot reserve " + format_bytes(nbytes) + ": " + errno_text(code) +
                                              advice_on(code, nbytes, room));
}

void SwapFile::read_back(uint64_t offset, std::byte* target, uint64_t nbytes) {
  read_file(offset, target, round_to_pages(nbytes));
}

void SwapFile::fill(uint64_t offset, uint64_t nbytes, std::byte value) {
  constexpr uint64_t kMaxBytes = 4 << 20;  // at once, as the I/O pool's requests
  nbytes = round_to_pages(nbytes);
  const uint64_t part_bytes = std::min(nbytes, kMaxBytes);
  const std::unique_ptr<void, void (*)(void*)> pages(std::aligned_alloc(kPageBytes, part_bytes), std::free);
  if (!pages) throw std::bad_alloc();
  std::memset(pages.get(), std::to_integer<int>(value), part_bytes);
  for (uint64_t begin = 0; begin < nbytes; begin += part_bytes) {
    write_file(offset + begin, static_cast<const std::byte*>(pages.get()), std::min(part_bytes, nbytes - begin));
  }
}

}  // namespace lmswap
