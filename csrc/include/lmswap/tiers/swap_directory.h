// The directory of swap files, opened once and not by its name again: nobody can lead it elsewhere in the meantime.
#pragma once

#include <string>

#include "lmswap/error.h"

namespace lmswap {

// A tier error that says in which directory.
Error directory_error(const std::string& directory, const std::string& text);

class SwapDirectory {
 public:
  // Throws Error(kTier) when it cannot serve: missing, unwritable, in memory, without direct I/O; or when it cannot be
  // trusted: a symbolic link of another user is on the way to it, or another user's directory is open to others.
  SwapDirectory(const std::string& path);  // NOLINT(google-explicit-constructor): a path is all that it is
  ~SwapDirectory();
  SwapDirectory(const SwapDirectory&) = delete;
  SwapDirectory& operator=(const SwapDirectory&) = delete;

  // A new file for direct I/O that only this user may open and that has no name, or loses it at once. Negative if there
  // can be none, with the reason in errno.
  int open_unnamed() const;

  const std::string& path() const { return path_; }

 private:
  const std::string path_;
  const int descriptor_;
};

}  // namespace lmswap
