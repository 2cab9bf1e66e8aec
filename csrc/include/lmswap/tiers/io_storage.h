// Storage that the CPU reads and writes by requests, on threads of the I/O pool: a file, or compressed memory.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "lmswap/faults.h"
#include "lmswap/tiers/arena.h"
#include "lmswap/tiers/storage.h"

namespace lmswap {

// Page-aligned memory of the thread's own that bytes may pass through.
using Bounce = std::span<std::byte>;

class IoStorage : public Storage {
 public:
  using Storage::Storage;

  // Move nbytes at `offset`, a multiple of the page; any number may run at once, of different bytes. What was written
  // by one request is read by one. Throw Error(kTransfer).
  virtual void write(uint64_t offset, const std::byte* source, uint64_t nbytes, Bounce bounce) = 0;
  virtual void read(uint64_t offset, std::byte* target, uint64_t nbytes, Bounce bounce) = 0;
};

// Calls `move(done, left, fault)` until all is moved: the kernel may move less than asked for, or be interrupted.
template <typename Move>
void move_all(const char* tier, const char* call, uint64_t offset, uint64_t nbytes, Faults& faults, Move move) {
  for (uint64_t done = 0; done < nbytes;) {
    const Fault fault = faults.next_after_delay(call);
    const uint64_t left = nbytes - done;
    const uint64_t asked = fault.is_short && left > kPageBytes ? round_to_pages(left / 2) : left;
    const ssize_t moved = fault.fail ? (errno = EIO, -1) : move(done, asked, fault);
    if (moved < 0 && errno == EINTR) continue;
    if (moved > 0) {
      done += static_cast<uint64_t>(moved);
      continue;
    }
    throw Error(ErrorKind::kTransfer, std::string(tier) + " tier: " + call + " of " + format_bytes(left) +
                                          " at offset " + std::to_string(offset + done) +
                                          " failed: " + (moved < 0 ? errno_text(errno) : "the file ends there"));
  }
}

}  // namespace lmswap
