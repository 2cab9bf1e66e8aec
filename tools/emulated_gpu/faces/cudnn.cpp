// libcudnn: only its version, which torch queries before cuDNN is disabled.
#include <cstddef>

#include "face.h"

EXPORTED size_t cudnnGetVersion() { return 92000; }  // 9.20, which torch is built with
