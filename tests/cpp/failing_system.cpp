#include "failing_system.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <mutex>
#include <utility>

using namespace lmswap::test;

namespace {

std::mutex bindings_mutex;
std::vector<cpu_set_t> bindings;

int fail(int code) {
  errno = code;
  return -1;
}

}  // namespace

std::vector<cpu_set_t> lmswap::test::take_bindings() {
  const std::lock_guard lock(bindings_mutex);
  return std::exchange(bindings, {});
}

// Visible to the C++ library, which makes the threads; the next one is the sanitizer's, where there is one.
extern "C" __attribute__((visibility("default"))) int pthread_create(pthread_t* thread,
                                                                     const pthread_attr_t* attributes,
                                                                     void* (*run)(void*), void* argument) noexcept {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto kNext = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (refused_thread == 1) return EAGAIN;
  if (refused_thread > 1) --refused_thread;
  return kNext(thread, attributes, run, argument);
}

extern "C" int fallocate(int descriptor, int mode, off_t offset, off_t nbytes) {
  const long result = syscall(SYS_fallocate, descriptor, mode, offset, nbytes);
  if (mode != 0 || num_failing_reservations == 0) return static_cast<int>(result);
  --num_failing_reservations;
  return fail(reservation_error);
}

extern "C" int openat(int directory, const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const bool is_unnamed = (flags & O_TMPFILE) == O_TMPFILE;
  const mode_t mode = is_unnamed || (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  if (is_unnamed && !has_unnamed_files) return fail(EOPNOTSUPP);
  const auto descriptor = static_cast<int>(syscall(SYS_openat, directory, path, flags, mode));
  if (descriptor < 0 || (flags & O_DIRECT) == 0 || has_direct_io) return descriptor;
  close(descriptor);
  return fail(EINVAL);
}

extern "C" ssize_t pwrite(int descriptor, const void* bytes, size_t nbytes, off_t offset) {
  if (nbytes < block_bytes) return fail(EINVAL);
  return syscall(SYS_pwrite64, descriptor, bytes, nbytes, offset);
}

// Flags of files as a filesystem has them that knows all.
extern "C" int ioctl(int descriptor, unsigned long request, ...) noexcept {
  va_list rest;
  va_start(rest, request);
  void* const argument = va_arg(rest, void*);
  va_end(rest);
  if (request == FS_IOC_GETFLAGS) return *static_cast<int*>(argument) = 0;
  if (request != FS_IOC_SETFLAGS) return static_cast<int>(syscall(SYS_ioctl, descriptor, request, argument));
  struct stat status = {};
  const bool is_empty = fstat(descriptor, &status) == 0 && status.st_blocks == 0;
  num_overwritten_in_place += is_empty && (*static_cast<int*>(argument) & FS_NOCOW_FL) != 0;
  return 0;
}

extern "C" int unlinkat(int directory, const char* path, int flags) noexcept {
  if (fails_to_remove.exchange(false)) return fail(EBUSY);
  return static_cast<int>(syscall(SYS_unlinkat, directory, path, flags));
}

extern "C" int memfd_create(const char* name, unsigned flags) noexcept {
  if ((flags & unknown_memory_flags) != 0) return fail(EINVAL);
  if ((flags & needed_memory_flags) != needed_memory_flags) return fail(EACCES);
  return static_cast<int>(syscall(SYS_memfd_create, name, flags));
}

extern "C" int sched_setaffinity(pid_t thread, size_t nbytes, const cpu_set_t* cpus) noexcept {
  {
    const std::lock_guard lock(bindings_mutex);
    bindings.push_back(*cpus);
  }
  return static_cast<int>(syscall(SYS_sched_setaffinity, thread, nbytes, cpus)) < 0 ? -1 : 0;
}
