#include "lmswap/heap/interpose.h"

#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <string_view>

#include "lmswap/error.h"

namespace lmswap::heap {
namespace {

#if defined(__x86_64__)
constexpr bool binds_symbol(uint64_t type) {
  return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT || type == R_X86_64_64;
}
#elif defined(__aarch64__)
constexpr bool binds_symbol(uint64_t type) {
  return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT || type == R_AARCH64_ABS64;
}
#else
#error "the relocation types of this architecture are not known here"
#endif

constexpr size_t kNotServing = SIZE_MAX;

// Never destroyed: tensors in static and interpreter-wide objects are freed after every static destructor has run.
std::atomic<PageHeap*> g_heap{nullptr};
std::atomic<size_t> g_threshold_bytes{kNotServing};

const size_t g_page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
const size_t g_memory_bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * g_page_bytes;

int served_posix_memalign(void** block, size_t alignment, size_t nbytes) {
  // More than the machine has is the C library's to refuse, in the way that callers know.
  if (nbytes >= g_threshold_bytes.load(std::memory_order_acquire) && nbytes <= g_memory_bytes &&
      alignment <= g_page_bytes) {
    if (void* const served = g_heap.load(std::memory_order_acquire)->allocate(nbytes)) {
      *block = served;
      return 0;
    }
  }
  return ::posix_memalign(block, alignment, nbytes);
}

void served_free(void* block) {
  PageHeap* const heap = g_heap.load(std::memory_order_acquire);
  if (heap != nullptr && heap->owns(block)) {
    heap->free(block);
  } else {
    ::free(block);
  }
}

struct Replacement {
  std::string_view symbol;
  uintptr_t address;
};

// `free` before `posix_memalign`: no block of the heap may exist while a library frees elsewhere.
const Replacement kReplacements[] = {
    {"free", reinterpret_cast<uintptr_t>(&served_free)},
    {"posix_memalign", reinterpret_cast<uintptr_t>(&served_posix_memalign)},
};

/// What of a loaded object is needed to find and write its bindings.
struct LoadedObject {
  const char* strings = nullptr;
  const ElfW(Sym) * symbols = nullptr;
  struct Table {
    const ElfW(Rela) * entries = nullptr;
    size_t count = 0;
  };
  Table bindings[2];  // DT_JMPREL, DT_RELA
  uintptr_t base = 0;
  Range read_only;  // RELRO: write-protected once the linker is done
};

LoadedObject describe(const dl_phdr_info& info) {
  LoadedObject object;
  object.base = info.dlpi_addr;
  const ElfW(Dyn)* dynamic = nullptr;
  for (size_t i = 0; i < info.dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info.dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(object.base + header.p_vaddr);
    if (header.p_type == PT_GNU_RELRO) object.read_only = {object.base + header.p_vaddr, header.p_memsz};
  }
  for (; dynamic != nullptr && dynamic->d_tag != DT_NULL; ++dynamic) {
    // glibc has relocated these pointers in place, other C libraries have not.
    const uintptr_t value = dynamic->d_un.d_ptr;
    const uintptr_t address = value < object.base ? object.base + value : value;
    switch (dynamic->d_tag) {
      case DT_STRTAB:
        object.strings = reinterpret_cast<const char*>(address);
        break;
      case DT_SYMTAB:
        object.symbols = reinterpret_cast<const ElfW(Sym)*>(address);
        break;
      case DT_JMPREL:
        object.bindings[0].entries = reinterpret_cast<const ElfW(Rela)*>(address);
        break;
      case DT_PLTRELSZ:
        object.bindings[0].count = dynamic->d_un.d_val / sizeof(ElfW(Rela));
        break;
      case DT_RELA:
        object.bindings[1].entries = reinterpret_cast<const ElfW(Rela)*>(address);
        break;
      case DT_RELASZ:
        object.bindings[1].count = dynamic->d_un.d_val / sizeof(ElfW(Rela));
        break;
      default:
        break;
    }
  }
  return object;
}

std::vector<uintptr_t*> bindings_of(const LoadedObject& object, std::string_view symbol) {
  std::vector<uintptr_t*> slots;
  for (const LoadedObject::Table& table : object.bindings) {
    for (size_t i = 0; i < table.count; ++i) {
      const ElfW(Rela) & entry = table.entries[i];
      if (!binds_symbol(ELF64_R_TYPE(entry.r_info))) continue;
      if (object.strings + object.symbols[ELF64_R_SYM(entry.r_info)].st_name == symbol)
        slots.push_back(reinterpret_cast<uintptr_t*>(object.base + entry.r_offset));
    }
  }
  return slots;
}

void write_binding(const LoadedObject& object, uintptr_t* slot, uintptr_t value) {
  const auto address = reinterpret_cast<uintptr_t>(slot);
  void* const page = reinterpret_cast<void*>(address / g_page_bytes * g_page_bytes);
  // RELRO is protected up to the last page boundary inside it.
  const bool is_read_only =
      address >= object.read_only.start && address < object.read_only.end() / g_page_bytes * g_page_bytes;
  if (is_read_only && mprotect(page, g_page_bytes, PROT_READ | PROT_WRITE) != 0)
    throw Error(ErrorKind::kOption,
                "heap_install: the bindings of a library cannot be made writable: " + errno_text(errno));
  std::atomic_ref<uintptr_t>(*slot).store(value, std::memory_order_release);
  if (is_read_only) mprotect(page, g_page_bytes, PROT_READ);
}

LoadedObject find_loaded(const std::string& library) {
  struct Search {
    std::string_view name;
    LoadedObject found;
  } search{library, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& wanted = *static_cast<Search*>(data);
        const std::string_view path(info->dlpi_name);
        if (path.substr(path.rfind('/') + 1) != wanted.name) return 0;
        wanted.found = describe(*info);
        return 1;
      },
      &search);
  if (search.found.symbols == nullptr)
    throw Error(ErrorKind::kOption,
                "heap_install: no loaded object is called '" + library + "'; import it first, and give its file name");
  if (bindings_of(search.found, "posix_memalign").empty() || bindings_of(search.found, "free").empty())
    throw Error(ErrorKind::kOption,
                "heap_install: '" + library + "' does not call both posix_memalign and free: nothing to serve");
  return search.found;
}

void make_heap() {
  // Addresses cost nothing: with four times the machine's memory, vacant ranges long enough are always to be found.
  auto* const heap = new PageHeap(4 * g_memory_bytes);
  g_heap.store(heap, std::memory_order_release);
  // The child inherits retained pages only to pay for copies of them: it drops them, and both sides keep their speed.
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
  if (threshold_bytes == 0) throw Error(ErrorKind::kOption, "heap_install: the threshold must be at least 1 byte");
  if (libraries.empty()) throw Error(ErrorKind::kOption, "heap_install: name at least one library to serve");
  std::vector<LoadedObject> objects;
  for (const std::string& library : libraries) objects.push_back(find_loaded(library));
  if (g_heap.load() == nullptr) make_heap();
  for (const Replacement& replacement : kReplacements)
    for (const LoadedObject& object : objects)
      for (uintptr_t* const slot : bindings_of(object, replacement.symbol))
        write_binding(object, slot, replacement.address);
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

void lend(size_t nbytes) {
  if (PageHeap* const heap = g_heap.load()) heap->lend(nbytes);
}

}  // namespace lmswap::heap
