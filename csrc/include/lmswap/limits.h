// What the system grants a process, in words for errors: a refusal has a number, and does not say which limit was
// reached.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "lmswap/error.h"

namespace lmswap {

// `name` is what the thread is called where the system refuses it, by an Error of that kind with the limits that may
// have been reached.
std::thread start_thread(const std::string& name, ErrorKind kind, std::function<void()> run);

// What to do when a file of `nbytes` is too large for the process or for the filesystem (EFBIG).
std::string file_size_advice(uint64_t nbytes);

}  // namespace lmswap
