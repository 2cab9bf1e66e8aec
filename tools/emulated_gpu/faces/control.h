// Control of the emulated machine by the stand-in kernels and Python: a C interface for what CUDA has no call for.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct EmulatedGpuUse {
  uintptr_t begin;
  size_t nbytes;
  int is_write;
};

// Where the bytes of an address lie that a device can use, for a kernel while it runs.
void* emulated_gpu_bytes_of(const void* address);

// Queues a kernel that uses these bytes, and computes and moves so many; `name` must live as long as the process.
// Returns a CUDA code.
int emulated_gpu_launch(void* stream, const char* name, const EmulatedGpuUse* uses, size_t num_uses, double flops,
                        double nbytes, void (*run)(void* argument), void* argument);
int emulated_gpu_wait(void* stream);

// A kernel failed while it ran: every later call fails with a device assert.
void emulated_gpu_break(const char* why);

// Undoes that, as a new process would, and forgets faults that were planned.
void emulated_gpu_mend();

// The nth call of a function from now fails with a CUDA code.
void emulated_gpu_plan_fault(const char* symbol, uint64_t nth, int code);

// From now on cuStreamWaitEvent does nothing, which lmswap's engine calls: what one would do that forgot to wait.
void emulated_gpu_ignore_waits_of_the_driver(int is_on);

// Rates in bytes per second, 0 for as fast as a core copies; seconds before each copy, and of random delay at most.
void emulated_gpu_configure(double out_rate, double in_rate, double latency_seconds, double jitter_seconds);

// What kernels take at least, by what they compute and move; rates of 0: as long as a core takes. Seconds of each.
void emulated_gpu_configure_compute(double flop_rate, double memory_rate, double latency_seconds);

// By how much longer kernels took since the last call, which were too much for the host's cores, in seconds.
double emulated_gpu_take_late_seconds();

// Whether devices may have peer access, and the rate in bytes per second of copies between those that have, as above.
void emulated_gpu_configure_peers(int have_access, double rate);

// All streams share one queue of the hardware; so many of a stream's operations at most are queued, 0 for any number.
void emulated_gpu_configure_queues(int is_one, size_t max_queued);

void emulated_gpu_set_capacity(int device, size_t nbytes);

// From now on calls are counted; the lines "symbol number" of all that were called since then. Valid as the next one's.
void emulated_gpu_start_counting();
const char* emulated_gpu_stop_counting();

// The lines "what number" of all that was made and not given back; valid until this thread's next call.
const char* emulated_gpu_held();

// The sentences of all violations since the last call, one a line; valid until this thread's next call.
const char* emulated_gpu_take_violations();

// Every function of NVIDIA's libraries that is not emulated ends here: see build.py. Returns a CUDA code.
int emulated_gpu_missing(const char* symbol);
}
