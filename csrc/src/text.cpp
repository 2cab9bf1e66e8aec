#include "lmswap/text.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>

namespace lmswap {

std::string read_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"), std::fclose);
  std::string text;
  std::array<char, 4096> part;
  for (size_t size = 1; file != nullptr && size > 0;) {
    size = std::fread(part.data(), 1, part.size(), file.get());
    text.append(part.data(), size);
  }
  return text;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t first = 0; first < text.size();) {
    const size_t end = std::min(text.find(separator, first), text.size());
    parts.push_back(text.substr(first, end - first));
    first = end + 1;
  }
  return parts;
}

}  // namespace lmswap
