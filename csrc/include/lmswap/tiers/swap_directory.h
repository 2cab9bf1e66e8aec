/// @file
/// @brief The directory of swap files.
#pragma once

#include <string>

#include "lmswap/error.h"

namespace lmswap {

/// @return an error that names the directory
TierError directory_error(const std::string& directory, const std::string& text);

/// @brief A directory that is opened once, and not by its path again, so that it cannot be redirected later.
class SwapDirectory {
 public:
  /// @throws TierError if the directory is unusable: missing, unwritable, in memory, without direct I/O; or untrusted:
  /// a symbolic link of another user is on its path, or another user's directory is writable for others
  SwapDirectory(const std::string& path);  // NOLINT(google-explicit-constructor): a path is all that it is
  ~SwapDirectory();
  SwapDirectory(const SwapDirectory&) = delete;
  SwapDirectory& operator=(const SwapDirectory&) = delete;

  /// @brief Creates a file that only this user may open, and that has no name, or loses it at once.
  /// @param access O_DIRECT for direct I/O; 0: through the page cache
  /// @return its descriptor; negative on failure, with the reason in errno
  [[nodiscard]] int open_unnamed(int access) const;

  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  const std::string path_;
  const int descriptor_;
};

}  // namespace lmswap
