// A library as the heap finds them: it allocates and frees through its own bindings. Built bound lazily and bound at
// load time, where the bindings are write-protected.
#include <cstdlib>

extern "C" void* client_allocate(size_t alignment, size_t nbytes) {
  void* block = nullptr;
  return posix_memalign(&block, alignment, nbytes) == 0 ? block : nullptr;
}

extern "C" void client_free(void* block) { free(block); }

extern "C" char* client_new(size_t nbytes) { return new char[nbytes]; }

extern "C" void client_delete(const char* block) { delete[] block; }
