/// @file
/// @brief An emulated link that the lanes of several processes share, as a bus that several devices are attached to.
#pragma once

#include <string>

#include "lmswap/lanes/bandwidth_limiter.h"

namespace lmswap {

/// @brief Opens a shared link.
///
/// The shared state is a small file that all processes map: when the link is next free, in each direction.
/// CLOCK_MONOTONIC is the same clock for the whole machine. A process that dies leaves the link reserved for at most
/// one chunk.
/// @param path the file; created with mode 0600 if it is missing
/// @throws OptionError if it cannot be opened, is a symbolic link, is not a file of this user and format, or belongs to
/// a link of other bandwidths
BandwidthLimiters open_shared_link(const std::string& path, double out_bytes_per_second, double in_bytes_per_second);

}  // namespace lmswap
