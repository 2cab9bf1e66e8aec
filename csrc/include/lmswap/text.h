// How is text read that the kernel or a user wrote?
//
// Not by streams: they look up the parts of a locale by ids that are shared with every libstdc++ of the process. Linked
// statically into the extension, as some toolchains do it, beside the one that torch is linked to, `file >> number` got
// a codecvt instead of a num_get and ended the process (g++ 13 on Ubuntu 24.04, torch 2.11, before the first copy).
#pragma once

#include <string>
#include <vector>

namespace lmswap {

// What is in a file; "" if it cannot be read.
std::string read_file(const std::string& path);

// What lies between separators, empty parts too, as "a,,b" has; what ends with one has no part after it.
std::vector<std::string> split(const std::string& text, char separator);

}  // namespace lmswap
