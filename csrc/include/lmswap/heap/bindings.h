// The bindings of a loaded library: the words in which it keeps the addresses of the functions that it calls, filled in
// by the linker. Whoever writes another address there is called instead.
#pragma once

#include <link.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lmswap/heap/heap.h"  // Range

namespace lmswap::heap {

/// One of those words.
class Binding {
 public:
  Binding(uintptr_t* slot, bool is_read_only) : slot_(slot), is_read_only_(is_read_only) {}

  [[nodiscard]] uintptr_t read() const noexcept;
  /// Throws Error(kOption) where it is write-protected and the protection cannot be lifted.
  void write(uintptr_t address) const;

 private:
  uintptr_t* slot_;
  bool is_read_only_;
};

class Library {
 public:
  /// A loaded object by its file name ("libc10.so"). Throws Error(kOption) when none is called so.
  static Library find(const std::string& file_name);

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::vector<Binding> bindings_of(std::string_view symbol) const;
  /// What `symbol` names in the library or in those that it depends on; nullptr when there is nothing.
  [[nodiscard]] void* find_definition(const char* symbol) const;

 private:
  explicit Library(const dl_phdr_info& info);

  struct Table {
    const ElfW(Rela) * entries = nullptr;
    size_t count = 0;
  };
  std::string path_;
  uintptr_t base_;
  const char* strings_ = nullptr;
  const ElfW(Sym) * symbols_ = nullptr;
  Table tables_[2];  // DT_JMPREL, DT_RELA
  Range read_only_;  // RELRO: write-protected once the linker is done
};

}  // namespace lmswap::heap
