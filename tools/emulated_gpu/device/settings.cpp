#include "settings.h"

#include <cstdio>
#include <cstdlib>

namespace emulated_gpu {
namespace {

double read_number(const char* name, double otherwise) {
  const char* text = getenv(name);
  if (text == nullptr) return otherwise;
  char* end = nullptr;
  const double number = strtod(text, &end);
  if (end != text && *end == '\0' && number >= 0) return number;
  fprintf(stderr, "%s is '%s', must be a number of at least 0\n", name, text);
  exit(2);
}

}  // namespace

Settings read_settings() {
  return {
      .num_devices = static_cast<int>(read_number("EMULATED_GPU_DEVICES", 1)),
      .capacity_bytes = static_cast<size_t>(read_number("EMULATED_GPU_BYTES", 8.0 * (1 << 30))),
      .context_bytes = static_cast<size_t>(read_number("EMULATED_GPU_CONTEXT_BYTES", 512.0 * (1 << 20))),
      .link = {read_number("EMULATED_GPU_OUT_RATE", 0), read_number("EMULATED_GPU_IN_RATE", 0),
               read_number("EMULATED_GPU_LATENCY", 0)},
      .peers = {read_number("EMULATED_GPU_PEER_ACCESS", 1) != 0, read_number("EMULATED_GPU_PEER_RATE", 0)},
      .has_host_addresses = read_number("EMULATED_GPU_HOST_ADDRESSES", 1) != 0,
      .compute = {read_number("EMULATED_GPU_FLOP_RATE", 0), read_number("EMULATED_GPU_MEMORY_RATE", 0),
                  read_number("EMULATED_GPU_KERNEL_LATENCY", 0)},
      .jitter_seconds = read_number("EMULATED_GPU_JITTER", 0),
      .seed = static_cast<unsigned>(read_number("EMULATED_GPU_SEED", 0)),
  };
}

}  // namespace emulated_gpu
