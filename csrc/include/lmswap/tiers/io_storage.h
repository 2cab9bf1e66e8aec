/// @file
/// @brief Storage that I/O threads read and write: a file, on a disk or in memory only.
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

/// Page-aligned memory of the calling thread, for bytes in transit.
using Scratch = std::span<std::byte>;

/// @brief Storage in a file. Requests are thread-safe if they access different bytes.
class IoStorage : public Storage {
 public:
  /// @brief Closes the file. Its space is freed even if a forked child still has it open, see `keep_for_children`.
  ~IoStorage() override;

  /// @brief Writes bytes; blocks.
  ///
  /// A range that was written by one request must be read by one.
  /// @param offset a multiple of the page
  /// @throws TransferError if the request fails
  virtual void write(uint64_t offset, const std::byte* source, uint64_t nbytes, Scratch scratch) = 0;

  /// @brief Reads bytes, as `write` has written them; blocks.
  /// @throws TransferError if the request fails
  virtual void read(uint64_t offset, std::byte* target, uint64_t nbytes, Scratch scratch) = 0;

 protected:
  /// @param tier name of the tier, for errors
  /// @param descriptor the file, which is owned; negative if it could not be opened
  IoStorage(std::string tier, uint64_t nbytes, int descriptor, std::shared_ptr<Faults> faults);
  [[nodiscard]] int descriptor() const { return descriptor_; }
  [[nodiscard]] Faults& faults() const { return *faults_; }

  /// @brief Lets forked children that have the file open read its bytes after it has been closed here.
  void keep_for_children() { is_kept_for_children_ = true; }

  /// @brief Write and read bytes of the file, unmodified.
  /// @throws TransferError if the system call fails
  void write_file(uint64_t offset, const std::byte* source, uint64_t nbytes);
  void read_file(uint64_t offset, std::byte* target, uint64_t nbytes);

 private:
  template <typename Move>
  void move_all(const char* call, uint64_t offset, uint64_t nbytes, Move move);

  const std::string tier_;
  const int descriptor_;
  const pid_t process_;
  const uint64_t num_forks_before_;
  bool is_kept_for_children_ = false;
  const std::shared_ptr<Faults> faults_;
};

}  // namespace lmswap
