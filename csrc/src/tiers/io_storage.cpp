#include "lmswap/tiers/io_storage.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <utility>

#include "lmswap/error.h"

namespace lmswap {
namespace {

std::atomic<uint64_t> num_forks = 0;
[[maybe_unused]] const int kIsCounting = pthread_atfork(nullptr, [] { ++num_forks; }, nullptr);

}  // namespace

IoStorage::IoStorage(std::string tier, uint64_t nbytes, int descriptor, std::shared_ptr<Faults> faults)
    : Storage(nbytes),
      tier_(std::move(tier)),
      descriptor_(descriptor),
      process_(getpid()),
      num_forks_before_(num_forks),
      faults_(std::move(faults)) {}

IoStorage::~IoStorage() {
  if (descriptor_ < 0) return;
  // A child forked meanwhile also has the file open, and would keep its pages or disk space allocated for as long as it
  // lives, as a data loader's worker does.
  const bool may_be_held = getpid() == process_ && num_forks != num_forks_before_ && !is_kept_for_children_;
  if (may_be_held && ftruncate(descriptor_, 0) != 0) log_error("a swap file was not emptied: " + errno_text(errno));
  close(descriptor_);
}

// Calls `move(done, nbytes, fault)` until all is moved: the kernel may move less than requested, or be interrupted.
template <typename Move>
void IoStorage::move_all(const char* call, uint64_t offset, uint64_t nbytes, Move move) {
  for (uint64_t done = 0; done < nbytes;) {
    const Fault fault = faults_->next_after_delay(call);
    const uint64_t left = nbytes - done;
    const uint64_t requested = fault.is_short && left > kPageBytes ? round_to_pages(left / 2) : left;
    const ssize_t moved = fault.fail ? (errno = EIO, -1) : move(done, requested, fault);
    if (moved < 0 && errno == EINTR) continue;
    if (moved > 0) {
      done += static_cast<uint64_t>(moved);
      continue;
    }
    throw TransferError(tier_ + " tier: " + call + " of " + format_bytes(left) + " at offset " +
                        std::to_string(offset + done) +
                        " failed: " + (moved < 0 ? errno_text(errno) : "the file ends there"));
  }
}

void IoStorage::write_file(uint64_t offset, const std::byte* source, uint64_t nbytes) {
  move_all("write", offset, nbytes, [&](uint64_t done, uint64_t requested, const Fault&) {
    return pwrite(descriptor_, source + done, requested, static_cast<off_t>(offset + done));
  });
}

void IoStorage::read_file(uint64_t offset, std::byte* target, uint64_t nbytes) {
  move_all("read", offset, nbytes, [&](uint64_t done, uint64_t requested, const Fault& fault) {
    const ssize_t moved = pread(descriptor_, target + done, requested, static_cast<off_t>(offset + done));
    if (moved > 0 && fault.flips) target[done] ^= std::byte{0x80};
    return moved;
  });
}

}  // namespace lmswap
