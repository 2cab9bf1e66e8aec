// Configuration of the emulated machine, read from the environment when it is first used.
#pragma once

#include <algorithm>
#include <cstddef>

namespace emulated_gpu {

struct Link {
  double out_bytes_per_second = 0;  // 0: as fast as a core copies
  double in_bytes_per_second = 0;
  double latency_seconds = 0;  // of every copy
};

// What two devices are to each other.
struct Peers {
  bool have_access = true;      // else copies between them go by way of the host
  double bytes_per_second = 0;  // of copies that do not; 0: as fast as a core copies
};

// A device that computes as fast as it is set to, whatever the host's cores do meanwhile, as long as they are faster.
struct Compute {
  double flops_per_second = 0;  // 0: as fast as a core computes
  double bytes_per_second = 0;  // of its memory; 0: as fast as a core reads and writes
  double latency_seconds = 0;   // of every kernel
};

// What a kernel has to do at least.
struct Amount {
  double flops = 0, nbytes = 0;
  [[nodiscard]] double seconds(const Compute& compute, double seconds_over_link = 0) const {
    const auto at = [](double rate, double amount) { return rate > 0 ? amount / rate : 0; };
    return compute.latency_seconds +
           std::max({at(compute.flops_per_second, flops), at(compute.bytes_per_second, nbytes), seconds_over_link});
  }
};

struct Settings {
  int num_devices;        // EMULATED_GPU_DEVICES, 1
  size_t capacity_bytes;  // EMULATED_GPU_BYTES, of each device, 8 GiB
  size_t context_bytes;   // EMULATED_GPU_CONTEXT_BYTES, of that what each context takes for good, 512 MiB
  Link link;              // EMULATED_GPU_OUT_RATE, EMULATED_GPU_IN_RATE: bytes per second; EMULATED_GPU_LATENCY
  Peers peers;            // EMULATED_GPU_PEER_ACCESS, 1 or 0; EMULATED_GPU_PEER_RATE
  // EMULATED_GPU_HOST_ADDRESSES, 1: registered memory has the host's addresses on devices; 0: others, as under WSL2
  bool has_host_addresses;
  Compute compute;        // EMULATED_GPU_FLOP_RATE, EMULATED_GPU_MEMORY_RATE, EMULATED_GPU_KERNEL_LATENCY
  double jitter_seconds;  // EMULATED_GPU_JITTER: what is queued runs late by a random time of at most so many
  unsigned seed;          // EMULATED_GPU_SEED, of the jitter
};

Settings read_settings();

}  // namespace emulated_gpu
