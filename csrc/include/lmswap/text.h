/// @file
/// @brief Reading of text that the kernel or a user wrote.
///
/// Not by C++ streams: they look up the facets of a locale by ids that all copies of libstdc++ in a process share. With
/// a copy linked statically into the extension, as some toolchains do, beside the one that torch is linked to,
/// `file >> number` got a codecvt instead of a num_get and ended the process (g++ 13 on Ubuntu 24.04, torch 2.11,
/// before the first copy).
#pragma once

#include <string>
#include <vector>

namespace lmswap {

/// @return the contents of a file; "" if it cannot be read
std::string read_file(const std::string& path);

/// @return the parts between separators, including empty ones ("a,,b"); none after a trailing separator
std::vector<std::string> split(const std::string& text, char separator);

}  // namespace lmswap
