// How is memory taken and given back? Giving back waits for all that is queued, as the real calls do.
#include "system.h"

namespace emulated_gpu {

int System::owner(const void* address) const {
  for (int index = 0; index < num_devices(); ++index) {
    if (devices_[index]->memory.owns(address)) return index;
  }
  return -1;
}

bool System::is_pinned(const void* address, size_t nbytes) {
  const std::lock_guard lock(mutex_);
  return pinned_.contains(address, nbytes);
}

bool System::is_allocated(const Use& use) {
  const void* address = reinterpret_cast<const void*>(use.begin);
  const int device = owner(address);
  return device < 0 || devices_[device]->memory.is_allocated(address, use.nbytes);
}

void System::set_capacity(int device, size_t nbytes) {
  const std::lock_guard lock(mutex_);
  devices_[device]->memory.set_capacity(nbytes);
}

std::pair<size_t, size_t> System::free_and_total_bytes(int device) {
  const std::lock_guard lock(mutex_);
  const DeviceMemory& memory = devices_[device]->memory;
  return {memory.capacity_bytes() - std::min(memory.used_bytes(), memory.capacity_bytes()), memory.capacity_bytes()};
}

int System::allocate_device(int device, void** address, size_t nbytes) {
  const std::lock_guard lock(mutex_);
  *address = devices_[device]->memory.allocate(nbytes);
  return *address == nullptr ? kOutOfMemory : kSuccess;
}

int System::free_device(void* address) {
  if (address == nullptr) return kSuccess;
  wait_all();
  const std::lock_guard lock(mutex_);
  const int device = owner(address);
  const size_t nbytes = device < 0 ? 0 : devices_[device]->memory.free(address);
  if (nbytes == 0) return report("device memory is given back that is not allocated", kInvalidValue);
  order_.forget(reinterpret_cast<uintptr_t>(address), nbytes);
  return kSuccess;
}

int System::allocate_pinned(void** address, size_t nbytes) {
  const std::lock_guard lock(mutex_);
  *address = pinned_.allocate(nbytes);
  return *address == nullptr ? kOutOfMemory : kSuccess;
}

int System::free_pinned(void* address) {
  if (address == nullptr) return kSuccess;
  wait_all();
  const std::lock_guard lock(mutex_);
  const size_t nbytes = pinned_.free(address);
  if (nbytes == 0) return report("pinned memory is given back that is not allocated", kInvalidValue);
  order_.forget(reinterpret_cast<uintptr_t>(address), nbytes);
  return kSuccess;
}

int System::register_pinned(void* address, size_t nbytes) {
  const std::lock_guard lock(mutex_);
  if (pinned_.meets(address, nbytes)) return report("memory is pinned that is pinned already", kAlreadyRegistered);
  pinned_.add(address, nbytes);
  return kSuccess;
}

int System::unregister_pinned(void* address) {
  wait_all();
  const std::lock_guard lock(mutex_);
  const size_t nbytes = pinned_.remove(address);
  if (nbytes == 0) return report("memory is unpinned that is not pinned", kHostMemoryNotRegistered);
  order_.forget(reinterpret_cast<uintptr_t>(address), nbytes);
  return kSuccess;
}

}  // namespace emulated_gpu
