#include "control.h"

#include <cstdio>

#include "face.h"

using namespace emulated_gpu;

EXPORTED void* emulated_gpu_bytes_of(const void* address) { return System::instance().bytes_of(address); }

EXPORTED int emulated_gpu_launch(void* stream, const char* name, const EmulatedGpuUse* uses, size_t num_uses,
                                 double flops, double nbytes, void (*run)(void* argument), void* argument) {
  if (current_device() < 0) System::instance().use_by_runtime(0);  // as a thread's first launch does
  std::vector<Use> all;
  for (size_t i = 0; i < num_uses; ++i) all.push_back({uses[i].begin, uses[i].nbytes, uses[i].is_write != 0});
  return enter("cudaLaunchKernel", [&](System& system) {
    return system.launch(stream, name, all, {flops, nbytes}, [=] { run(argument); });
  });
}

EXPORTED int emulated_gpu_wait(void* stream) { return System::instance().wait_stream(stream); }

EXPORTED void emulated_gpu_break(const char* why) {
  System& system = System::instance();
  fprintf(stderr, "A kernel of the emulated GPU failed, and the context with it: %s\n", why);
  system.faults.break_context(kAssert);
}

EXPORTED void emulated_gpu_mend() { System::instance().mend(); }

EXPORTED void emulated_gpu_plan_fault(const char* symbol, uint64_t nth, int code) {
  System::instance().faults.plan(symbol, nth, code);
}

EXPORTED void emulated_gpu_ignore_waits_of_the_driver(int is_on) {
  System::instance().ignores_waits_of_the_driver = is_on != 0;
}

EXPORTED void emulated_gpu_configure(double out_rate, double in_rate, double latency_seconds, double jitter_seconds) {
  System::instance().configure({out_rate, in_rate, latency_seconds}, jitter_seconds);
}

EXPORTED void emulated_gpu_configure_compute(double flop_rate, double memory_rate, double latency_seconds) {
  System::instance().configure({flop_rate, memory_rate, latency_seconds});
}

EXPORTED double emulated_gpu_take_late_seconds() { return System::instance().late_seconds.exchange(0); }

EXPORTED void emulated_gpu_configure_peers(int have_access, double rate) {
  System::instance().configure(Peers{have_access != 0, rate});
}

EXPORTED void emulated_gpu_configure_queues(int is_one, size_t max_queued) {
  System::instance().configure(Queues{is_one != 0, max_queued});
}

EXPORTED void emulated_gpu_set_capacity(int device, size_t nbytes) { System::instance().set_capacity(device, nbytes); }

EXPORTED void emulated_gpu_start_counting() { System::instance().calls.start(); }

EXPORTED const char* emulated_gpu_stop_counting() {
  static thread_local std::string lines;
  lines.clear();
  for (const auto& [symbol, number] : System::instance().calls.stop()) {
    lines += symbol + " " + std::to_string(number) + "\n";
  }
  return lines.c_str();
}

EXPORTED const char* emulated_gpu_held() {
  static thread_local std::string lines;
  const Held held = System::instance().held();
  lines = "contexts " + std::to_string(held.contexts) + "\nstreams " + std::to_string(held.streams) + "\nevents " +
          std::to_string(held.events) + "\npinned_bytes " + std::to_string(held.pinned_bytes) + "\ndevice_bytes " +
          std::to_string(held.device_bytes) + "\n";
  return lines.c_str();
}

EXPORTED const char* emulated_gpu_take_violations() {
  static thread_local std::string lines;
  lines.clear();
  for (const std::string& sentence : System::instance().violations.take()) lines += sentence + "\n";
  return lines.c_str();
}

EXPORTED int emulated_gpu_missing(const char* symbol) {
  return System::instance().report(std::string(symbol) + " is not emulated", kNotSupported);
}
