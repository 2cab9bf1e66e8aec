// One emulated link for the lanes of several processes, as a bus that several devices hang on.
//
// What they share is a small file, mapped by all of them: when the link is free again, each way. CLOCK_MONOTONIC is one
// clock for the whole machine. A process that dies leaves the link taken for one chunk at most.
#pragma once

#include <string>

#include "lmswap/lanes/pacer.h"

namespace lmswap {

// Maps the file at `path` and makes it, mode 0600, if it is not there. Throws Error(kOption) when it cannot be opened,
// is a symbolic link, is not ours, or belongs to a link of other rates.
Pacers open_shared_link(const std::string& path, double out_bytes_per_second, double in_bytes_per_second);

}  // namespace lmswap
