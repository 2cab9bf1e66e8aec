// Common part of all entry points: export, check for injected faults, record of the error.
#pragma once

#include "../device/system.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace emulated_gpu {

// Of the symbol, whatever code runs: a forked child, a broken context and a planned fault come before it.
template <typename Call>
int enter(const char* symbol, Call call) {
  System& system = System::instance();
  const int code = system.enter(symbol);
  return code != kSuccess ? code : call(system);
}

int attribute_of(int attribute);  // of every emulated device; the runtime's numbers are the driver's

}  // namespace emulated_gpu
