#include "lmswap/tiers/swap_directory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <list>
#include <random>
#include <utility>

#include "lmswap/error.h"
#include "lmswap/text.h"
#include "lmswap/tiers/arena.h"

namespace lmswap {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) close(value_);
  }
  Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  int get() const { return value_; }
  int release() { return std::exchange(value_, -1); }

 private:
  int value_;
};

bool is_trusted(uid_t owner) { return owner == 0 || owner == geteuid(); }

std::list<std::string> names_in(const std::string& path) {
  std::list<std::string> names;
  for (const std::string& name : split(path, '/')) {
    if (!name.empty() && name != ".") names.push_back(name);
  }
  return names;
}

Descriptor start_of(const std::string& path) {
  return Descriptor(open(path.front() == '/' ? "/" : ".", O_PATH | O_DIRECTORY | O_CLOEXEC));
}

// The target of a symbolic link; throws if its owner is not trusted.
std::string target_of(const std::string& directory, const std::string& name, int link, uid_t owner) {
  if (!is_trusted(owner)) {
    throw directory_error(directory, "'" + name + "' on the way to it is a symbolic link of another user (" +
                                         std::to_string(owner) +
                                         "), who may lead it elsewhere at any time; name the directory itself");
  }
  std::array<char, PATH_MAX> target;
  const ssize_t length = readlinkat(link, "", target.data(), target.size());
  if (length <= 0) throw directory_error(directory, "cannot be used: " + errno_text(errno));
  return {target.data(), static_cast<size_t>(length)};
}

// Opens the path component by component, each relative to the one before, so that what is checked is what is opened.
int open_trusted(const std::string& path) {
  constexpr int kMaxLinks = 40;  // as in the kernel
  if (path.empty()) throw directory_error(path, "is no path");
  Descriptor here = start_of(path);
  std::list<std::string> parts = names_in(path);
  struct stat status = {};
  for (int num_links = 0; !parts.empty();) {
    const std::string name = std::move(parts.front());
    parts.pop_front();
    Descriptor next(openat(here.get(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
    if (next.get() < 0 || fstat(next.get(), &status) != 0) {
      throw directory_error(path, "cannot be used: " + errno_text(errno));
    }
    if (S_ISLNK(status.st_mode)) {
      if (++num_links > kMaxLinks) throw directory_error(path, "cannot be used: " + errno_text(ELOOP));
      const std::string target = target_of(path, name, next.get(), status.st_uid);
      if (target.front() == '/') here = start_of(target);
      parts.splice(parts.begin(), names_in(target));
    } else if (S_ISDIR(status.st_mode)) {
      here = std::move(next);
    } else {
      throw directory_error(path, "is not a directory");
    }
  }
  if (fstat(here.get(), &status) != 0) throw directory_error(path, "cannot be used: " + errno_text(errno));
  const bool is_ours = is_trusted(status.st_uid);
  const mode_t writable = is_ours ? S_IWOTH : S_IWGRP | S_IWOTH;  // many systems give each user a group of its own
  if ((status.st_mode & writable) != 0 && (status.st_mode & S_ISVTX) == 0) {
    const std::string owner = is_ours ? "" : "belongs to another user (" + std::to_string(status.st_uid) + ") and ";
    throw directory_error(
        path, owner + "is open to others, who may change what is in it; make one of your own, and chmod 700 it");
  }
  return here.release();
}

void check_filesystem(const std::string& path, int descriptor) {
  struct statfs filesystem;
  if (fstatfs(descriptor, &filesystem) != 0) {
    throw directory_error(path, "its filesystem cannot be asked for its kind: " + errno_text(errno));
  }
  if (filesystem.f_type == TMPFS_MAGIC || filesystem.f_type == RAMFS_MAGIC) {
    throw directory_error(path,
                          "the directory is memory (tmpfs or ramfs), so swapping to it would free nothing; "
                          "name a directory on a real disk");
  }
}

// Disks with blocks larger than a page, which Linux supports from 6.15 on, open files for direct I/O but refuse to
// write single pages.
void check_blocks(const std::string& path, int descriptor) {
  alignas(kPageBytes) static constexpr std::byte kPage[kPageBytes] = {};
  if (pwrite(descriptor, kPage, kPageBytes, 0) == static_cast<ssize_t>(kPageBytes)) return;
  if (errno == EINVAL) {
    throw directory_error(
        path, "direct I/O there is in blocks of more than " + std::to_string(kPageBytes) + " bytes; name another disk");
  }
  throw directory_error(path, "nothing can be written there: " + errno_text(errno));
}

}  // namespace

TierError directory_error(const std::string& directory, const std::string& text) {
  return TierError("disk tier in '" + directory + "': " + text);
}

SwapDirectory::SwapDirectory(const std::string& path) : path_(path), descriptor_(open_trusted(path)) {
  Descriptor owned(descriptor_);  // closed if anything below throws
  check_filesystem(path, descriptor_);
  const Descriptor file(open_unnamed(O_DIRECT));
  if (file.get() < 0 && errno == EINVAL) {
    throw directory_error(path, "its filesystem has no direct I/O (O_DIRECT); name another disk");
  }
  if (file.get() < 0) throw directory_error(path, "no file can be made there: " + errno_text(errno));
  check_blocks(path, file.get());
  owned.release();
}

SwapDirectory::~SwapDirectory() { close(descriptor_); }

int SwapDirectory::open_unnamed(int access) const {
  const int flags = O_RDWR | access | O_CLOEXEC | O_EXCL;  // O_EXCL: the file cannot be linked to a name later
  const int descriptor = openat(descriptor_, ".", O_TMPFILE | flags, S_IRUSR | S_IWUSR);
  if (descriptor >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return descriptor;
  std::random_device random;
  const std::string name = ".lmswap-" + std::to_string(random()) + std::to_string(random());
  Descriptor named(openat(descriptor_, name.c_str(), O_CREAT | O_NOFOLLOW | flags, S_IRUSR | S_IWUSR));
  if (named.get() >= 0 && unlinkat(descriptor_, name.c_str(), 0) == 0) return named.release();
  const int code = errno;
  // The kernel creates the file before it reports that there is no direct I/O; and some filesystems cannot remove an
  // open file.
  named = Descriptor(-1);
  if (code != EEXIST) unlinkat(descriptor_, name.c_str(), 0);
  errno = code;
  return -1;
}

}  // namespace lmswap
