// Storage that the CPU reads and writes by requests, on threads of the I/O pool: a file, on a disk or in memory only.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "lmswap/faults.h"
#include "lmswap/tiers/arena.h"  // the page
#include "lmswap/tiers/storage.h"

namespace lmswap {

// Page-aligned memory of the thread's own that bytes may pass through.
using Bounce = std::span<std::byte>;

class IoStorage : public Storage {
 public:
  ~IoStorage() override;

  // Move nbytes at `offset`, a multiple of the page; any number may run at once, of different bytes. What was written
  // by one request is read by one. Throw Error(kTransfer).
  virtual void write(uint64_t offset, const std::byte* source, uint64_t nbytes, Bounce bounce) = 0;
  virtual void read(uint64_t offset, std::byte* target, uint64_t nbytes, Bounce bounce) = 0;

 protected:
  // Closes `descriptor` in the end, unless it is negative; `tier` is its name in errors.
  IoStorage(std::string tier, uint64_t nbytes, int descriptor, std::shared_ptr<Faults> faults);
  int descriptor() const { return descriptor_; }
  Faults& faults() const { return *faults_; }

  // Move bytes of the file as they are. Throw Error(kTransfer).
  void write_file(uint64_t offset, const std::byte* source, uint64_t nbytes);
  void read_file(uint64_t offset, std::byte* target, uint64_t nbytes);

 private:
  template <typename Move>
  void move_all(const char* call, uint64_t offset, uint64_t nbytes, Move move);

  const std::string tier_;
  const int descriptor_;
  const pid_t process_;
  const uint64_t num_forks_before_;
  const std::shared_ptr<Faults> faults_;
};

}  // namespace lmswap
