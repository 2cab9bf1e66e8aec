#include "lmswap/error.h"

#include <cstdio>
#include <system_error>

namespace lmswap {

BytesDiffer::BytesDiffer(int64_t swap_, uint64_t nbytes_, uint64_t offset_bytes_)
    : TransferError("what came back is not what left, first within the MiB at byte " + std::to_string(offset_bytes_)),
      swap(swap_),
      nbytes(nbytes_),
      offset_bytes(offset_bytes_) {}

void log_error(const std::string& text) noexcept { std::fprintf(stderr, "lmswap: %s\n", text.c_str()); }

std::string format_bytes(uint64_t nbytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%.1f MiB (%llu bytes)", static_cast<double>(nbytes) / (1 << 20),
                static_cast<unsigned long long>(nbytes));
  return text;
}

std::string errno_text(int code) {
  return std::system_category().message(code) + " (errno " + std::to_string(code) + ")";
}

}  // namespace lmswap
