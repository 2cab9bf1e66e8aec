// A stand-in for libcuda on machines without a GPU, and a strict one: what real CUDA lets pass in silence it reports.
//
// It exports the symbols that the engine opens. Streams are threads, so that copies really run beside each other and
// beside the caller; device memory is ordinary memory. Misuse is recorded as a violation, and the call fails if it can:
//   - waiting for, or asking the time of, an event that was never recorded
//   - handles that were destroyed or never made; another context than the device's, or none
//   - copies from or to memory that is not the device's, not pinned by one registration, or freed by the time the copy
//     runs
//   - freeing what is not allocated; registering what is registered, unregistering what is not
//   - two uses of the same bytes, one of them a write, without an order between them by events or by the host. This is
//     found from the calls alone (vector clocks), whatever the threads happened to do.
// The host counts as one thread: what any thread has synchronized with, all later calls are ordered after.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Forgets violations, planned failures and delays. Everything made before stays valid.
void fake_cuda_reset();

size_t fake_cuda_num_violations();
const char* fake_cuda_violation(size_t index);  // valid until the next reset

// Live "streams" (default ones do not count), "events", "contexts" (retained and not released), "host_bytes" that are
// pinned, "device_bytes"; "failures" that are still to come; "registrations" of host memory so far.
uint64_t fake_cuda_count(const char* what);

// Makes existing memory device memory, or ordinary memory again.
void fake_cuda_register(void* pointer, size_t nbytes);
void fake_cuda_unregister(void* pointer);

// Declares that a kernel on `stream` uses these bytes, for the check of order; queues nothing.
void fake_cuda_use(void* stream, uint64_t pointer, size_t nbytes, int is_write);

// Everything queued from now on runs late by a random time of at most so many seconds.
void fake_cuda_set_delay(double most_seconds);

// The n-th call from now of a function, by its symbol, fails with a CUDA error code; "*" stands for all of those that
// may fail, which are not the ones that give back.
void fake_cuda_fail(const char* symbol, uint64_t nth, int code);

// Forgets failures that are still to come.
void fake_cuda_forget_failures();

// From now on streams wait for no event: what an engine would do that forgot to ask for it.
void fake_cuda_ignore_waits(int is_on);

void fake_cuda_set_version(int version);
}
