/// @file
/// @brief The symbol bindings of loaded libraries.
///
/// A binding is a word, filled in by the dynamic linker, that holds the address of a function that the library calls;
/// storing another address there redirects the calls.
#pragma once

#include <link.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lmswap/heap/heap.h"  // Range

namespace lmswap::heap {

/// @return the last part of a path
std::string_view file_name_of(std::string_view path);

/// @brief One binding.
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

  /// @return the bindings through which the library calls `symbol`
  [[nodiscard]] std::vector<Binding> bindings_of(std::string_view symbol) const;

  /// @return the definition of `symbol` in the library or those that it depends on; nullptr if there is none
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
  Range read_only_;  // RELRO: write-protected once the linker has finished
};

}  // namespace lmswap::heap
