#include "lmswap/tiers/io_storage.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

#include "lmswap/error.h"

namespace lmswap {

IoStorage::IoStorage(std::string tier, uint64_t nbytes, int descriptor, std::shared_ptr<Faults> faults)
    : Storage(nbytes), tier_(std::move(tier)), descriptor_(descriptor), faults_(std::move(faults)) {}

IoStorage::~IoStorage() {
  if (descriptor_ >= 0) close(descriptor_);
}

// Calls `move(done, left, fault)` until all is moved: the kernel may move less than asked for, or be interrupted.
template <typename Move>
void IoStorage::move_all(const char* call, uint64_t offset, uint64_t nbytes, Move move) {
  for (uint64_t done = 0; done < nbytes;) {
    const Fault fault = faults_->next_after_delay(call);
    const uint64_t left = nbytes - done;
    const uint64_t asked = fault.is_short && left > kPageBytes ? round_to_pages(left / 2) : left;
    const ssize_t moved = fault.fail ? (errno = EIO, -1) : move(done, asked, fault);
    if (moved < 0 && errno == EINTR) continue;
    if (moved > 0) {
      done += static_cast<uint64_t>(moved);
      continue;
    }
    throw Error(ErrorKind::kTransfer, tier_ + " tier: " + call + " of " + format_bytes(left) + " at offset " +
                                          std::to_string(offset + done) +
                                          " failed: " + (moved < 0 ? errno_text(errno) : "the file ends there"));
  }
}

void IoStorage::write_file(uint64_t offset, const std::byte* source, uint64_t nbytes) {
  move_all("write", offset, nbytes, [&](uint64_t done, uint64_t asked, const Fault&) {
    return pwrite(descriptor_, source + done, asked, static_cast<off_t>(offset + done));
  });
}

void IoStorage::read_file(uint64_t offset, std::byte* target, uint64_t nbytes) {
  move_all("read", offset, nbytes, [&](uint64_t done, uint64_t asked, const Fault& fault) {
    const ssize_t moved = pread(descriptor_, target + done, asked, static_cast<off_t>(offset + done));
    if (moved > 0 && fault.flips) target[done] ^= std::byte{0x80};
    return moved;
  });
}

}  // namespace lmswap
