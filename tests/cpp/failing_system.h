// Calls of the C library that fail on demand, in the tests' whole program: what the system refuses a process that is
// about to train is what it refuses here.
#pragma once

#include <sched.h>

#include <atomic>
#include <vector>

namespace lmswap::test {

// The nth thread from now on is refused, and all after it until 0 is set: EAGAIN, as by a limit on their number.
inline std::atomic<int> refused_thread{0};

// The next so many reservations of a file's room fail with the number; what a real one would have taken is taken.
inline std::atomic<int> num_failing_reservations{0}, reservation_error{0};

// Files without a name are refused as by filesystems that have none; with a name they are made, and then refused too.
inline std::atomic<bool> has_unnamed_files{true}, has_direct_io{true};
// Writes of less than this are refused, as by a disk with such blocks.
inline std::atomic<size_t> block_bytes{1};
// How often a file without any room was to write its blocks in place.
inline std::atomic<int> num_overwritten_in_place{0};
// The next removal of a name fails.
inline std::atomic<bool> fails_to_remove{false};

// What flags files in memory must have, else EACCES, and which ones the kernel does not know: EINVAL.
inline std::atomic<unsigned> needed_memory_flags{0}, unknown_memory_flags{0};

// Where threads were bound to, while it is watched.
std::vector<cpu_set_t> take_bindings();

}  // namespace lmswap::test
