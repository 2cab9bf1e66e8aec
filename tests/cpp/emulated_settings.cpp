// Configuration of the emulated GPU of the C++ tests: two devices, and the same random delays in each run.
#include "../../tools/emulated_gpu/device/settings.h"

namespace emulated_gpu {

Settings read_settings() {
  return {.num_devices = 2,
          .capacity_bytes = size_t{1} << 33,
          .context_bytes = 0,
          .link = {},
          .peers = {},
          .has_host_addresses = true,
          .compute = {},
          .jitter_seconds = 0,
          .seed = 7};
}

}  // namespace emulated_gpu
