// Ownership of addresses: the memory of one device, and the host memory that copies may use while the host goes on.
//
// Device addresses are of an inaccessible range; the bytes lie at a fixed distance from them. Host code that
// follows a device pointer dies, as it would with a real device; kernels get the addresses of the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace emulated_gpu {

// Allocations by their begin.
class Blocks {
 public:
  void add(uintptr_t begin, size_t nbytes) { blocks_[begin] = nbytes; }
  size_t remove(uintptr_t begin);                      // its size, or 0: there is none
  bool contain(uintptr_t begin, size_t nbytes) const;  // in one of them
  bool meet(uintptr_t begin, size_t nbytes) const;
  size_t nbytes() const;  // of all
  void keep(const std::function<bool(uintptr_t begin, size_t nbytes)>& is_kept);

 private:
  std::map<uintptr_t, size_t> blocks_;
};

class DeviceMemory {
 public:
  DeviceMemory(size_t capacity_bytes, size_t context_bytes);

  void* allocate(size_t nbytes);   // null: more than is free
  size_t free(const void* begin);  // its size, or 0: that is not allocated
  bool owns(const void* address) const;
  bool is_allocated(const void* begin, size_t nbytes) const;
  size_t capacity_bytes() const { return capacity_bytes_; }
  size_t used_bytes() const { return used_bytes_; }  // in granules, the context's among them
  size_t allocated_bytes() const { return allocated_.nbytes(); }
  void set_capacity(size_t nbytes) { capacity_bytes_ = nbytes; }

  // Where the bytes of an address lie that this device owns.
  static void* bytes_of(const void* address);

 private:
  uintptr_t base_ = 0;
  size_t capacity_bytes_, used_bytes_;
  Blocks allocated_;
  std::map<uintptr_t, size_t> holes_;
};

class PinnedMemory {
 public:
  void* allocate(size_t nbytes);
  size_t free(void* begin);
  void add(void* begin, size_t nbytes);
  size_t remove(void* begin);
  bool contains(const void* begin, size_t nbytes) const;
  bool meets(const void* begin, size_t nbytes) const;
  size_t nbytes() const { return blocks_.nbytes(); }
  void forget_unmapped();  // what a broken context kept its users from giving back

 private:
  Blocks blocks_;
};

}  // namespace emulated_gpu
