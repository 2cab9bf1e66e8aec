#include "lmswap/direct_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "lmswap/error.h"

namespace lmswap {
namespace {

Error tier_error(const std::string& directory, const std::string& text) {
  return Error(ErrorKind::kTier, "disk tier in '" + directory + "': " + text);
}

// A file that has no name from the start, or, where the filesystem has no such thing, loses it at once.
int open_unnamed(const std::string& directory) {
  constexpr int kFlags = O_RDWR | O_DIRECT | O_CLOEXEC;
  const int descriptor = open(directory.c_str(), O_TMPFILE | kFlags, 0600);
  if (descriptor >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return descriptor;
  std::random_device random;
  const std::string path = directory + "/.lmswap-" + std::to_string(random()) + std::to_string(random());
  const int named = open(path.c_str(), O_CREAT | O_EXCL | O_NOFOLLOW | kFlags, 0600);
  if (named >= 0) unlink(path.c_str());
  return named;
}

std::string room_text(int descriptor) {
  struct statvfs room;
  if (fstatvfs(descriptor, &room) != 0) return "unknown";
  return format_bytes(static_cast<uint64_t>(room.f_bavail) * room.f_frsize);
}

bool is_page_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kPageBytes == 0; }

}  // namespace

void DirectFile::check_directory(const std::string& directory) {
  struct stat status;
  if (stat(directory.c_str(), &status) != 0) throw tier_error(directory, "cannot be used: " + errno_text(errno));
  if (!S_ISDIR(status.st_mode)) throw tier_error(directory, "is not a directory");
  struct statfs filesystem;
  if (statfs(directory.c_str(), &filesystem) != 0) {
    throw tier_error(directory, "its filesystem cannot be asked for its kind: " + errno_text(errno));
  }
  if (filesystem.f_type == TMPFS_MAGIC || filesystem.f_type == RAMFS_MAGIC) {
    throw tier_error(directory,
                     "the directory is memory (tmpfs or ramfs), so swapping to it would free nothing; "
                     "name a directory on a real disk");
  }
  const int descriptor = open_unnamed(directory);
  if (descriptor < 0) {
    const int code = errno;
    if (code == EINVAL) throw tier_error(directory, "its filesystem has no direct I/O (O_DIRECT); name another disk");
    throw tier_error(directory, "no file can be made there: " + errno_text(code));
  }
  close(descriptor);
}

DirectFile::DirectFile(const std::string& directory, uint64_t nbytes, std::shared_ptr<Faults> faults)
    : Storage(nbytes), faults_(std::move(faults)), descriptor_(open_unnamed(directory)) {
  if (descriptor_ < 0) throw tier_error(directory, "no file can be made there: " + errno_text(errno));
  int code = 0;
  if (faults_->next_after_delay("reserve").fail) {
    code = ENOSPC;
  } else if (fallocate(descriptor_, 0, 0, static_cast<off_t>(nbytes)) != 0) {
    code = errno;
  }
  if (code == 0) return;
  const std::string room = room_text(descriptor_);
  close(descriptor_);
  throw tier_error(directory, "cannot reserve " + format_bytes(nbytes) + ": " + errno_text(code) +
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

namespace {

// Calls `move(done, left)` until all is moved: the kernel may move less than asked for, or be interrupted.
template <typename Move>
void move_all(const char* call, uint64_t offset, uint64_t nbytes, Faults& faults, Move move) {
  for (uint64_t done = 0; done < nbytes;) {
    const Fault fault = faults.next_after_delay(call);
    const uint64_t left = nbytes - done;
    const uint64_t asked = fault.is_short && left > kPageBytes ? left / 2 / kPageBytes * kPageBytes : left;
    const ssize_t moved = fault.fail ? (errno = EIO, -1) : move(done, asked);
    if (moved < 0 && errno == EINTR) continue;
    if (moved > 0) {
      done += static_cast<uint64_t>(moved);
      continue;
    }
    throw Error(ErrorKind::kTransfer, std::string("disk tier: ") + call + " of " + format_bytes(left) + " at offset " +
                                          std::to_string(offset + done) +
                                          " failed: " + (moved < 0 ? errno_text(errno) : "the file ends there"));
  }
}

}  // namespace

void DirectFile::write_pages(uint64_t offset, const std::byte* source, uint64_t nbytes) {
  move_all("write", offset, nbytes, *faults_, [&](uint64_t done, uint64_t asked) {
    return pwrite(descriptor_, source + done, asked, static_cast<off_t>(offset + done));
  });
}

void DirectFile::read_pages(uint64_t offset, std::byte* target, uint64_t nbytes) {
  move_all("read", offset, nbytes, *faults_, [&](uint64_t done, uint64_t asked) {
    return pread(descriptor_, target + done, asked, static_cast<off_t>(offset + done));
  });
}

}  // namespace lmswap
