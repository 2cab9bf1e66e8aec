/// @file
/// @brief Resource limits of the process, for error messages: an errno does not say which limit was reached.
#pragma once

#include <concepts>
#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "lmswap/error.h"

namespace lmswap {

/// @return a message for a thread that the system refused: the errno and the limits that may have been reached
/// @param name description of the thread
/// @param code errno of the refusal
std::string thread_refusal_text(const std::string& name, int code);

/// @brief Starts a thread.
/// @tparam E the class of the error
/// @param name description of the thread for the error
/// @throws E if the system refuses the thread
template <std::derived_from<Error> E>
std::thread start_thread(const std::string& name, std::function<void()> run) {
  try {
    return std::thread(std::move(run));
  } catch (const std::system_error& error) {
    throw E(thread_refusal_text(name, error.code().value()));
  }
}

/// @return what to do when a file of `nbytes` exceeds the limit of the process or of the filesystem (EFBIG)
std::string file_size_advice(uint64_t nbytes);

}  // namespace lmswap
