// A library as libc10 is where torch is built on mimalloc: it has a CPU allocator of its own, calls it through its own
// bindings, and imports no posix_memalign. A header before each block stands for what only that allocator knows.
#include <cstdlib>
#include <cstring>

constexpr size_t kHeaderBytes = 4096;

extern "C" bool FLAGS_caffe2_cpu_allocator_do_zero_fill, FLAGS_caffe2_cpu_allocator_do_junk_fill;
bool FLAGS_caffe2_cpu_allocator_do_zero_fill = false, FLAGS_caffe2_cpu_allocator_do_junk_fill = false;

namespace c10 {

[[gnu::noinline]] void* alloc_cpu(size_t nbytes) {
  auto* const header = static_cast<char*>(std::malloc(kHeaderBytes + nbytes));
  std::strcpy(header, "allocator");
  if (FLAGS_caffe2_cpu_allocator_do_zero_fill) std::memset(header + kHeaderBytes, 0, nbytes);
  return header + kHeaderBytes;
}

[[gnu::noinline]] void free_cpu(void* block) {
  if (block == nullptr) return;
  char* const header = static_cast<char*>(block) - kHeaderBytes;
  if (std::strcmp(header, "allocator") != 0) std::abort();
  std::free(header);
}

}  // namespace c10

extern "C" void* allocator_allocate(size_t nbytes) { return c10::alloc_cpu(nbytes); }
extern "C" void allocator_free(void* block) { c10::free_cpu(block); }
