// Serves the large allocations of chosen shared libraries from one process-wide PageHeap, without LD_PRELOAD.
//
// The linker's tables of the named libraries are patched so that their calls of torch's CPU allocator, c10::alloc_cpu
// and c10::free_cpu, and of `posix_memalign` and `free` arrive here. Allocations of at least the threshold come from
// the heap; whatever else is asked for, and every pointer that is not the heap's, goes on to the original.
//
// Both pairs are needed: tensors come from alloc_cpu, which is built on posix_memalign or, in torch's aarch64 wheels
// since 2.10 (pytorch PR 164741), on mimalloc; scratch of libtorch_cpu comes from posix_memalign everywhere.
//
// A block must come back through a patched function. In torch (2.13, all callers read off the binaries) this holds:
// alloc_cpu pairs with free_cpu, which libc10 and libtorch_cpu call through their tables; in libtorch_cpu oneDNN,
// fbgemm, ideep, pthreadpool, XNNPACK, Sleef and Xbyak each free what they allocated; nobody calls realloc or
// malloc_usable_size on such memory. MKL allocates by malloc and is not served. Code that takes a tensor's memory away
// from torch and calls the C library's free itself is broken with plain torch too, as any allocator of torch may be
// replaced. Tools that patch the same tables (memray, heaptrack) are overruled with the next tensor: they see what is
// not the heap's, and no more.
//
// Not served: posix_memalign with an alignment above a page; alloc_cpu while a C++ program makes it fill its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lmswap/heap/heap.h"

namespace lmswap::heap {

/// Serves allocations of at least `threshold_bytes` of `libraries`: loaded objects, by file name ("libc10.so").
///
/// Installing again adds libraries, sets the new threshold and lifts the limit; what is loaded later has to be named
/// then. Throws Error(kOption), with nothing newly served, when a library is not loaded or calls neither pair.
void install(size_t threshold_bytes, const std::vector<std::string>& libraries);

/// Serves no new allocation and gives retained pages back. Live blocks stay valid until freed, at once to the kernel:
/// the patched `free` stays, for they may come back at any time.
void uninstall();

[[nodiscard]] bool is_installed();
[[nodiscard]] bool owns(uintptr_t pointer);
[[nodiscard]] Stats stats();
[[nodiscard]] size_t reusable_bytes();
[[nodiscard]] std::vector<Change> changes(double start_seconds, double stop_seconds);
void reset_peak();
void set_limit(size_t resident_bytes);
void trim();
void lend(size_t nbytes);

}  // namespace lmswap::heap
