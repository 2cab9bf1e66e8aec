#include "lmswap/heap/bindings.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <optional>

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

uintptr_t page_of(uintptr_t address) {
  static const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return address / page_bytes * page_bytes;
}

}  // namespace

std::string_view file_name_of(std::string_view path) { return path.substr(path.rfind('/') + 1); }

uintptr_t Binding::read() const noexcept { return std::atomic_ref<uintptr_t>(*slot_).load(std::memory_order_relaxed); }

void Binding::write(uintptr_t address) const {
  void* const page = reinterpret_cast<void*>(page_of(reinterpret_cast<uintptr_t>(slot_)));
  if (is_read_only_ && mprotect(page, sizeof *slot_, PROT_READ | PROT_WRITE) != 0)
    throw OptionError("heap_install: the bindings of a library cannot be made writable: " + errno_text(errno));
  std::atomic_ref<uintptr_t>(*slot_).store(address, std::memory_order_release);
  if (is_read_only_) mprotect(page, sizeof *slot_, PROT_READ);
}

Library Library::find(const std::string& file_name) {
  struct Search {
    std::string_view name;
    std::optional<Library> found;
  } search{file_name, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& wanted = *static_cast<Search*>(data);
        if (file_name_of(info->dlpi_name) != wanted.name) return 0;
        wanted.found = Library(*info);
        return 1;
      },
      &search);
  if (search.found && search.found->symbols_ != nullptr) return *search.found;
  throw OptionError("heap_install: no loaded object is called '" + file_name +
                    "'; import it first, and give its file name");
}

Library::Library(const dl_phdr_info& info) : path_(info.dlpi_name), base_(info.dlpi_addr) {
  const ElfW(Dyn)* dynamic = nullptr;
  for (size_t i = 0; i < info.dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info.dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(base_ + header.p_vaddr);
    if (header.p_type == PT_GNU_RELRO) read_only_ = {base_ + header.p_vaddr, header.p_memsz};
  }
  for (; dynamic != nullptr && dynamic->d_tag != DT_NULL; ++dynamic) {
    // glibc relocates these pointers in place, other C libraries do not.
    const uintptr_t value = dynamic->d_un.d_ptr;
    const uintptr_t address = value < base_ ? base_ + value : value;
    switch (dynamic->d_tag) {
      case DT_STRTAB:
        strings_ = reinterpret_cast<const char*>(address);
        break;
      case DT_SYMTAB:
        symbols_ = reinterpret_cast<const ElfW(Sym)*>(address);
        break;
      case DT_JMPREL:
        tables_[0].entries = reinterpret_cast<const ElfW(Rela)*>(address);
        break;
      case DT_PLTRELSZ:
        tables_[0].count = dynamic->d_un.d_val / sizeof(ElfW(Rela));
        break;
      case DT_RELA:
        tables_[1].entries = reinterpret_cast<const ElfW(Rela)*>(address);
        break;
      case DT_RELASZ:
        tables_[1].count = dynamic->d_un.d_val / sizeof(ElfW(Rela));
        break;
      default:
        break;
    }
  }
}

std::vector<Binding> Library::bindings_of(std::string_view symbol) const {
  std::vector<Binding> bindings;
  for (const Table& table : tables_) {
    for (size_t i = 0; i < table.count; ++i) {
      const ElfW(Rela) & entry = table.entries[i];
      if (!binds_symbol(ELF64_R_TYPE(entry.r_info))) continue;
      if (strings_ + symbols_[ELF64_R_SYM(entry.r_info)].st_name != symbol) continue;
      const uintptr_t slot = base_ + entry.r_offset;
      // RELRO is protected up to the last page boundary inside it.
      const bool is_read_only = slot >= read_only_.start && slot < page_of(read_only_.end());
      bindings.emplace_back(reinterpret_cast<uintptr_t*>(slot), is_read_only);
    }
  }
  return bindings;
}

void* Library::find_definition(const char* symbol) const {
  void* const handle = dlopen(path_.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  void* const found = dlsym(handle, symbol);
  dlclose(handle);
  return found;
}

}  // namespace lmswap::heap
