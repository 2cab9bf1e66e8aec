// libcudnn: which version is it? Torch asks before it decides to do without.
#include <cstddef>

#include "face.h"

EXPORTED size_t cudnnGetVersion() { return 92000; }  // 9.20, which torch is built with
