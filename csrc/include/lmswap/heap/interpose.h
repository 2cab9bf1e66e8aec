/// @file
/// @brief Serves the large allocations of chosen shared libraries from one process-wide PageHeap, without LD_PRELOAD.
///
/// The linker's tables of the named libraries are patched so that their calls of torch's CPU allocator, c10::alloc_cpu
/// and c10::free_cpu, of `posix_memalign` and `free`, and of `operator new` arrive here. Allocations of at least the
/// threshold are served from the heap; all others, and all pointers that are not the heap's, are passed to the original
/// functions.
///
/// All are needed: tensors come from alloc_cpu, which is built on posix_memalign or, in torch's aarch64 wheels since
/// 2.10 (pytorch PR 164741), on mimalloc; scratch of oneDNN comes from posix_memalign everywhere, and that of torch's
/// own kernels from operator new (convolutions in bf16 without oneDNN: 5 MiB each). Its blocks are freed by operator
/// delete, in whatever library, which calls libstdc++'s binding of `free`; where another allocator has replaced the
/// operators, they are not served.
///
/// A block must be freed through a patched function. In torch (2.13, all callers read from the binaries) this holds:
/// alloc_cpu pairs with free_cpu, which libc10 and libtorch_cpu call through their tables; in libtorch_cpu oneDNN,
/// fbgemm, ideep, pthreadpool, XNNPACK, Sleef and Xbyak each free what they allocated; nothing calls realloc or
/// malloc_usable_size on such memory. MKL allocates by malloc and is not served. Code that takes ownership of a
/// tensor's memory and calls the C library's free itself is broken with plain torch too, as torch's allocator may be
/// replaced. Tools that patch the same tables (memray, heaptrack) are overridden at the next tensor: they only see
/// allocations that are not the heap's.
///
/// Not served: posix_memalign with an alignment above a page; operator new with an alignment; alloc_cpu while a C++
/// program makes it fill its memory.
///
/// All functions are thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lmswap/heap/heap.h"

namespace lmswap::heap {

/// @brief Serves allocations of at least `threshold_bytes` of `libraries`.
///
/// Installing again adds libraries, sets the new threshold and removes the limit; libraries loaded later must be named
/// then.
/// @param libraries file names of loaded libraries ("libc10.so")
/// @throws OptionError if a library is not loaded or calls neither pair; nothing more is served then
void install(size_t threshold_bytes, const std::vector<std::string>& libraries);

/// @brief Serves no new allocations and returns retained pages to the kernel.
///
/// Live blocks stay valid until freed; their pages are then returned at once. The patched `free` stays in place, since
/// they may be freed at any time.
void uninstall();

[[nodiscard]] bool is_installed();
[[nodiscard]] bool owns(uintptr_t pointer);

/// The functions of the process-wide `PageHeap`; before `install` they do nothing, and return zeros.
[[nodiscard]] Stats stats();
[[nodiscard]] size_t reusable_bytes();
[[nodiscard]] std::vector<Change> changes(double start_seconds, double stop_seconds);
void reset_peak();
void set_limit(size_t resident_bytes);
void trim();
void decommit(size_t nbytes);

}  // namespace lmswap::heap
