// The one exception of the runtime. bind.cpp maps each kind to the class of lmswap.errors with the same name.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace lmswap {

enum class ErrorKind {
  kOption,    // an argument cannot be used; nothing was started
  kTier,      // host memory or disk that was to hold bytes cannot
  kDriver,    // a call of the device driver failed
  kTransfer,  // moving bytes failed in the middle of a step
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// What a copy in has brought is not what was copied out: a transfer error that says within which MiB.
class BytesChanged : public Error {
 public:
  BytesChanged(int64_t swap, uint64_t nbytes, uint64_t offset_bytes);

  const int64_t swap;
  const uint64_t nbytes, offset_bytes;
};

// Says on standard error what went wrong where nothing can be thrown.
void complain(const std::string& text) noexcept;

// "12.3 MiB (12900000 bytes)": for messages.
std::string format_bytes(uint64_t nbytes);

// "No space left on device (errno 28)".
std::string errno_text(int code);

}  // namespace lmswap
