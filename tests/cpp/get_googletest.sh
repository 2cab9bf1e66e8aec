#!/bin/sh
# Where is the GoogleTest that the C++ tests are built with? Installed, or else Debian's package unpacked in the folder
# that is given, for which nobody needs to be root. Where neither can be had, one line says so and the exit status is 1.
set -eu
folder=$1

if echo 'int main() {}' | "${CXX:-c++}" -x c++ -include gtest/gtest.h - -lgtest -pthread -o /dev/null 2>/dev/null ||
  [ -e "$folder/usr/include/gtest/gtest.h" ]; then
  exit 0
fi

echo "Getting GoogleTest for the C++ tests: Debian's libgtest-dev, unpacked in $folder; seconds, 10 MB of package lists"
rm -rf "$folder"
mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
cd "$folder"
apt() {  # with lists and a cache of its own: those of the system are root's, and may be empty
  apt-get -qq -o Dir::State::Lists="$PWD/lists" -o Dir::Cache="$PWD/cache" -o APT::Sandbox::User=root "$@"
}
if ! (apt update && apt download libgtest-dev && dpkg-deb -x libgtest-dev_*.deb . && rm -r lists cache) >log 2>&1; then
  echo "SKIPPED, the C++ tests: there is no GoogleTest, and Debian's could not be fetched ($(head -n 1 log));" \
    "install it, as libgtest-dev (Debian, Ubuntu), gtest-devel (Fedora) or gtest (Arch)"
  exit 1
fi
