#include "lmswap/lanes/shared_link.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <new>
#include <thread>

#include "lmswap/error.h"

namespace lmswap {
namespace {

constexpr uint64_t kMagic = 0x316b6e694c70616d;  // "mapLink1": of this layout

struct Contents {
  uint64_t magic;
  double out_bytes_per_second, in_bytes_per_second;
  FreeAt out, in;
};
static_assert(FreeAt::is_always_lock_free, "an atomic with a lock does not work between processes");

OptionError refusal(const std::string& path, const std::string& why) {
  return OptionError("the shared link '" + path + "' " + why);
}

std::string rates_text(double out, double in) {
  return std::to_string(out / 1e9) + " GB/s out, " + std::to_string(in / 1e9) + " GB/s in";
}

class File {
 public:
  explicit File(const std::string& path)
      : descriptor_(open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, S_IRUSR | S_IWUSR)) {
    if (descriptor_ < 0) {
      throw refusal(
          path, errno == ELOOP ? "is a symbolic link; name the file itself" : "cannot be opened: " + errno_text(errno));
    }
  }
  ~File() {
    flock(descriptor_, LOCK_UN);  // explicitly: a mapping keeps the file open, and so its lock
    close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int descriptor() const { return descriptor_; }

  // Held for the microseconds that opening takes; a longer lock is not ours.
  bool lock() const {
    constexpr int kMaxTries = 1000;
    for (int i = 0; i < kMaxTries; ++i) {
      if (flock(descriptor_, LOCK_EX | LOCK_NB) == 0) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }

 private:
  int descriptor_;
};

}  // namespace

BandwidthLimiters open_shared_link(const std::string& path, double out_bytes_per_second, double in_bytes_per_second) {
  const File file(path);
  if (!file.lock()) throw refusal(path, "is locked by another process; name another");
  struct stat status;
  if (fstat(file.descriptor(), &status) != 0) throw refusal(path, "cannot be read: " + errno_text(errno));
  const bool is_new = status.st_size == 0;
  if (!S_ISREG(status.st_mode) || status.st_uid != geteuid() || (!is_new && status.st_size != sizeof(Contents))) {
    throw refusal(path, "is no file of ours; name another, which will be made");
  }
  if (is_new && ftruncate(file.descriptor(), sizeof(Contents)) != 0) {
    throw refusal(path, "cannot be made: " + errno_text(errno));
  }
  void* mapped = mmap(nullptr, sizeof(Contents), PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor(), 0);
  if (mapped == MAP_FAILED) throw refusal(path, "cannot be mapped: " + errno_text(errno));
  const std::shared_ptr<void> memory(mapped, [](void* pointer) { munmap(pointer, sizeof(Contents)); });
  auto* contents = static_cast<Contents*>(mapped);
  if (is_new) new (contents) Contents{kMagic, out_bytes_per_second, in_bytes_per_second, {0}, {0}};
  if (contents->magic != kMagic) throw refusal(path, "is no file of ours; name another, which will be made");
  if (contents->out_bytes_per_second != out_bytes_per_second || contents->in_bytes_per_second != in_bytes_per_second) {
    throw refusal(path, "has " + rates_text(contents->out_bytes_per_second, contents->in_bytes_per_second) + ", not " +
                            rates_text(out_bytes_per_second, in_bytes_per_second) +
                            "; remove the file when nobody uses it any more, or name another");
  }
  return {BandwidthLimiter(out_bytes_per_second, std::shared_ptr<FreeAt>(memory, &contents->out)),
          BandwidthLimiter(in_bytes_per_second, std::shared_ptr<FreeAt>(memory, &contents->in))};
}

}  // namespace lmswap
