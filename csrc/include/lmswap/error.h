/// @file
/// @brief Exceptions of the runtime, and helpers for their messages.
///
/// bind.cpp maps each class to the class of lmswap.errors with the same name.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace lmswap {

/// @brief Base class of all exceptions of the runtime; always thrown as one of its subclasses.
class Error : public std::runtime_error {
 protected:
  using std::runtime_error::runtime_error;
};

/// @brief An argument cannot be used; nothing was started.
class OptionError : public Error {
 public:
  using Error::Error;
};

/// @brief Host memory, device memory or disk space of a tier cannot be obtained.
class TierError : public Error {
 public:
  using Error::Error;
};

/// @brief A call of the device driver failed.
class DriverError : public Error {
 public:
  using Error::Error;
};

/// @brief A copy failed during a step.
class TransferError : public Error {
 public:
  using Error::Error;
};

/// @brief A copy in returned other bytes than were copied out.
class BytesDiffer : public TransferError {
 public:
  /// @param swap number of the swap, as passed to `Engine::out_start`
  /// @param nbytes size of the block
  /// @param offset_bytes offset of the first MiB that differs
  BytesDiffer(int64_t swap, uint64_t nbytes, uint64_t offset_bytes);

  const int64_t swap;
  const uint64_t nbytes, offset_bytes;
};

/// @brief Writes a message to standard error, where no exception can be thrown.
void log_error(const std::string& text) noexcept;

/// @return a size for messages: "12.3 MiB (12900000 bytes)"
std::string format_bytes(uint64_t nbytes);

/// @return an errno for messages: "No space left on device (errno 28)"
std::string errno_text(int code);

}  // namespace lmswap
