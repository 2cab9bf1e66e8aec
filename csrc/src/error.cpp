#include "lmswap/error.h"

#include <cstdio>
#include <system_error>

namespace lmswap {

void complain(const std::string& text) noexcept { std::fprintf(stderr, "lmswap: %s\n", text.c_str()); }

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
