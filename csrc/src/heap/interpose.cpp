#include "lmswap/heap/interpose.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <iterator>
#include <mutex>
#include <new>
#include <optional>

#include "lmswap/error.h"
#include "lmswap/heap/bindings.h"

namespace lmswap::heap {
namespace {

constexpr size_t kNotServing = SIZE_MAX;

// Never destroyed: tensors in static and interpreter-wide objects are freed after every static destructor has run.
std::atomic<PageHeap*> g_heap{nullptr};
std::atomic<size_t> g_threshold_bytes{kNotServing};

const size_t g_page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
const size_t g_memory_bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * g_page_bytes;

// torch's CPU allocator: c10::alloc_cpu(size_t) and c10::free_cpu(void*), as the libraries define them.
using AllocCpu = void* (*)(size_t);
using FreeCpu = void (*)(void*);
constexpr const char* kAllocCpu = "_ZN3c109alloc_cpuEm";
constexpr const char* kFreeCpu = "_ZN3c108free_cpuEPv";
std::atomic<AllocCpu> g_alloc_cpu{nullptr};
std::atomic<FreeCpu> g_free_cpu{nullptr};

// The C++ runtime whose operators end in its own calls of malloc and free; operator new(size_t) and new[](size_t).
constexpr const char* kRuntime = "libstdc++.so.6";
constexpr const char* kNew = "_Znwm";
constexpr const char* kNewArray = "_Znam";
constexpr const char* kDelete = "_ZdlPv";

// Flags by which C++ programs make alloc_cpu fill what it returns.
constexpr const char* kFillFlags[] = {"FLAGS_caffe2_cpu_allocator_do_zero_fill",
                                      "FLAGS_caffe2_cpu_allocator_do_junk_fill"};
std::atomic<const bool*> g_fill_flags[2] = {nullptr, nullptr};

struct Patch {
  Binding binding;
  uintptr_t address;
};
// The current contents of all patched bindings; replaced as a whole.
std::atomic<const std::vector<Patch>*> g_patches{nullptr};
std::mutex g_patches_mutex;

void write_patches(const std::vector<Patch>& patches) {
  for (const Patch& patch : patches)
    if (patch.binding.read() != patch.address) patch.binding.write(patch.address);
}

// Restores patched bindings. Other tools write the same ones at any time: memray and heaptrack when they begin and end,
// and when a library is loaded. A block of the heap passed to their `free` would end the process. Called for each
// tensor, by functions that such tools do not patch.
void restore_patches() noexcept {
  const std::vector<Patch>& patches = *g_patches.load(std::memory_order_acquire);
  const auto is_intact = [](const Patch& patch) { return patch.binding.read() == patch.address; };
  if (std::all_of(patches.begin(), patches.end(), is_intact)) return;
  try {
    const std::lock_guard guard(g_patches_mutex);
    write_patches(patches);
  } catch (const std::exception& error) {
    log_error("another tool has replaced bindings that the heap needs: " + std::string(error.what()));
  }
}

// A block of the heap, or nullptr where another allocator must serve.
void* serve(size_t nbytes) {
  // A request for more than the machine has is left to the C library, which refuses it in the usual way.
  if (nbytes < g_threshold_bytes.load(std::memory_order_acquire) || nbytes > g_memory_bytes) return nullptr;
  return g_heap.load(std::memory_order_acquire)->allocate(nbytes);
}

// Frees a block of the heap; false for others.
bool try_free(void* block) {
  PageHeap* const heap = g_heap.load(std::memory_order_acquire);
  if (heap == nullptr || !heap->owns(block)) return false;
  heap->free(block);
  return true;
}

int served_posix_memalign(void** block, size_t alignment, size_t nbytes) {
  if (alignment <= g_page_bytes) {
    if (void* const served = serve(nbytes)) {
      *block = served;
      return 0;
    }
  }
  return ::posix_memalign(block, alignment, nbytes);
}

void served_free(void* block) {
  if (!try_free(block)) ::free(block);
}

bool is_filled() {
  for (const std::atomic<const bool*>& flag : g_fill_flags) {
    const bool* const value = flag.load(std::memory_order_relaxed);
    if (value != nullptr && *value) return true;
  }
  return false;
}

void* served_alloc_cpu(size_t nbytes) {
  restore_patches();
  void* const served = is_filled() ? nullptr : serve(nbytes);
  return served != nullptr ? served : g_alloc_cpu.load(std::memory_order_acquire)(nbytes);
}

void served_free_cpu(void* block) {
  restore_patches();
  if (!try_free(block)) g_free_cpu.load(std::memory_order_acquire)(block);
}

void* served_new(size_t nbytes) {
  void* const served = serve(nbytes);
  return served != nullptr ? served : ::operator new(nbytes);
}

struct Replacement {
  const char* symbol;
  uintptr_t address;
};
struct Pair {
  Replacement free, allocate;
};
const Pair kPairs[] = {
    {{"free", reinterpret_cast<uintptr_t>(&served_free)},
     {"posix_memalign", reinterpret_cast<uintptr_t>(&served_posix_memalign)}},
    {{kFreeCpu, reinterpret_cast<uintptr_t>(&served_free_cpu)},
     {kAllocCpu, reinterpret_cast<uintptr_t>(&served_alloc_cpu)}},
};

bool calls_both(const Library& library, const Pair& pair) {
  return !library.bindings_of(pair.free.symbol).empty() && !library.bindings_of(pair.allocate.symbol).empty();
}

Library find_client(const std::string& name) {
  Library library = Library::find(name);
  if (std::none_of(std::begin(kPairs), std::end(kPairs), [&](const Pair& pair) { return calls_both(library, pair); }))
    throw OptionError("heap_install: '" + name +
                      "' calls neither posix_memalign and free nor c10::alloc_cpu and c10::free_cpu: "
                      "nothing to serve");
  return library;
}

void find_originals(const Library& library) {
  if (void* const found = library.find_definition(kFreeCpu)) g_free_cpu = reinterpret_cast<FreeCpu>(found);
  if (void* const found = library.find_definition(kAllocCpu)) g_alloc_cpu = reinterpret_cast<AllocCpu>(found);
  for (size_t i = 0; i < std::size(kFillFlags); ++i)
    if (const void* const found = library.find_definition(kFillFlags[i]))
      g_fill_flags[i] = static_cast<const bool*>(found);
}

bool is_of_runtime(const Library& library, const char* symbol) {
  void* const preloaded = dlsym(RTLD_DEFAULT, symbol);
  void* const found = preloaded != nullptr ? preloaded : library.find_definition(symbol);
  Dl_info info{};
  if (found == nullptr || dladdr(found, &info) == 0) return false;
  return file_name_of(info.dli_fname) == kRuntime;
}

// The runtime, if `library` allocates by its operators: not where another allocator has replaced them, whose operator
// delete does not call the runtime's `free`.
std::optional<Library> find_runtime(const Library& library) {
  if (library.bindings_of(kNew).empty() && library.bindings_of(kNewArray).empty()) return {};
  for (const char* const symbol : {kNew, kNewArray, kDelete})
    if (!is_of_runtime(library, symbol)) return {};
  Library runtime = Library::find(kRuntime);
  if (runtime.bindings_of("free").empty()) return {};
  return runtime;
}

// The patches of operator new in `libraries`, after that of the `free` to which operator delete passes its blocks in
// whatever library it is called.
void append_operators(const std::vector<Library>& libraries, std::vector<Patch>& patches) {
  std::optional<Library> runtime;
  std::vector<Patch> operators;
  for (const Library& library : libraries) {
    const auto found = find_runtime(library);
    if (!found) continue;
    runtime = found;
    for (const char* const symbol : {kNew, kNewArray})
      for (const Binding& binding : library.bindings_of(symbol))
        operators.push_back({binding, reinterpret_cast<uintptr_t>(&served_new)});
  }
  if (!runtime) return;
  for (const Binding& binding : runtime->bindings_of("free"))
    patches.push_back({binding, reinterpret_cast<uintptr_t>(&served_free)});
  patches.insert(patches.end(), operators.begin(), operators.end());
}

// The patches of `libraries`, functions that free first: no block of the heap may exist while a library frees it
// elsewhere.
std::vector<Patch> patches_of(const std::vector<Library>& libraries) {
  std::vector<Patch> patches;
  for (const auto replacement : {&Pair::free, &Pair::allocate})
    for (const Library& library : libraries)
      for (const Pair& pair : kPairs)
        if (calls_both(library, pair))
          for (const Binding& binding : library.bindings_of((pair.*replacement).symbol))
            patches.push_back({binding, (pair.*replacement).address});
  append_operators(libraries, patches);
  return patches;
}

// Adds `libraries`, which are never unloaded, to those that are served.
void patch(const std::vector<Library>& libraries) {
  static auto* const clients = new std::vector<Library>;
  static auto* const all_patches = new std::deque<std::vector<Patch>>;  // threads may still read earlier ones
  const std::lock_guard guard(g_patches_mutex);
  const size_t num_before = clients->size();
  for (const Library& library : libraries) {
    const auto is_it = [&](const Library& client) { return client.path() == library.path(); };
    if (std::none_of(clients->begin(), clients->end(), is_it)) clients->push_back(library);
  }
  if (clients->size() > num_before) {
    all_patches->push_back(patches_of(*clients));
    g_patches.store(&all_patches->back(), std::memory_order_release);
  }
  write_patches(all_patches->back());
}

void make_heap() {
  // Addresses cost nothing: in four times the machine's memory, long enough vacant ranges always exist.
  auto* const heap = new PageHeap(4 * g_memory_bytes);
  g_heap.store(heap, std::memory_order_release);
  // The child drops inherited retained pages, since writes to them would copy them, in parent and child.
  pthread_atfork([] { g_heap.load()->lock(); }, [] { g_heap.load()->unlock(); },
                 [] {
                   g_heap.load()->unlock();
                   g_heap.load()->trim();
                 });
}

}  // namespace

void install(size_t threshold_bytes, const std::vector<std::string>& libraries) {
  static std::mutex mutex;
  const std::lock_guard guard(mutex);
  if (threshold_bytes == 0) throw OptionError("heap_install: the threshold must be at least 1 byte");
  if (libraries.empty()) throw OptionError("heap_install: name at least one library to serve");
  std::vector<Library> clients;
  for (const std::string& library : libraries) clients.push_back(find_client(library));
  if (g_heap.load() == nullptr) make_heap();
  for (const Library& client : clients) find_originals(client);
  patch(clients);
  g_heap.load()->set_limit(0);
  g_threshold_bytes.store(threshold_bytes, std::memory_order_release);
}

void uninstall() {
  g_threshold_bytes.store(kNotServing, std::memory_order_release);
  if (PageHeap* const heap = g_heap.load()) heap->set_limit(1);  // one byte: nothing is ever retained
}

bool is_installed() { return g_threshold_bytes.load() != kNotServing; }

bool owns(uintptr_t pointer) {
  const PageHeap* const heap = g_heap.load();
  return heap != nullptr && heap->owns(reinterpret_cast<const void*>(pointer));
}

Stats stats() {
  const PageHeap* const heap = g_heap.load();
  return heap == nullptr ? Stats{} : heap->stats();
}

size_t reusable_bytes() {
  const PageHeap* const heap = g_heap.load();
  return heap == nullptr ? 0 : heap->reusable_bytes();
}

std::vector<Change> changes(double start_seconds, double stop_seconds) {
  const PageHeap* const heap = g_heap.load();
  return heap == nullptr ? std::vector<Change>{} : heap->changes(start_seconds, stop_seconds);
}

void reset_peak() {
  if (PageHeap* const heap = g_heap.load()) heap->reset_peak();
}

void set_limit(size_t resident_bytes) {
  if (PageHeap* const heap = g_heap.load()) heap->set_limit(resident_bytes);
}

void trim() {
  if (PageHeap* const heap = g_heap.load()) heap->trim();
}

void decommit(size_t nbytes) {
  if (PageHeap* const heap = g_heap.load()) heap->decommit(nbytes);
}

}  // namespace lmswap::heap
