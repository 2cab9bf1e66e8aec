// Allocation and release of device memory. Release waits for all that is queued, as the real calls do. Torch counts on
// that. A caller that may not gets a violation that names what was still queued, and does not know by it what is over.
#include "system.h"

namespace emulated_gpu {
namespace {

// From the host's address of registered memory to a device's, where it is another.
constexpr uintptr_t kElsewhere = uintptr_t{1} << 60;

void* moved(void* address, uintptr_t distance) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) + distance);
}

}  // namespace

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

bool System::is_mapped(const void* address, size_t nbytes) {
  const std::lock_guard lock(mutex_);
  return mapped_.contains(address, nbytes);
}

bool System::crosses_registrations(const void* host, size_t nbytes) {
  const std::lock_guard lock(mutex_);
  return pinned_.meets(host, nbytes) && !pinned_.contains(host, nbytes);
}

void* System::device_address(void* host) {
  const std::lock_guard lock(mutex_);
  if (elsewhere_.contains(host, 1)) return moved(host, kElsewhere);
  return mapped_.contains(host, 1) ? host : nullptr;
}

void* System::host_address(void* device) {
  const std::lock_guard lock(mutex_);
  void* const host = moved(device, -kElsewhere);
  return elsewhere_.contains(host, 1) ? host : device;
}

void* System::bytes_of(const void* address) const {
  return owner(address) < 0 ? const_cast<void*>(address) : DeviceMemory::bytes_of(address);
}

bool System::is_allocated(const Use& use) {
  const void* address = reinterpret_cast<const void*>(use.begin);
  const int device = owner(address);
  return device < 0 || devices_[device]->memory.is_allocated(address, use.nbytes);
}

bool System::is_addressable(const Use& use) {
  const void* address = reinterpret_cast<const void*>(use.begin);
  return use.nbytes == 0 || owner(address) >= 0 || mapped_.contains(address, use.nbytes);
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

int System::give_back(void* address, InUse in_use, const char* otherwise, int code, std::function<size_t()> remove) {
  for (int device = 0; device < num_devices(); ++device) {
    const VectorClock over = run_dry(device);
    if (in_use == InUse::kWaitedFor) know(over);
  }
  const std::lock_guard lock(mutex_);
  const size_t nbytes = remove();
  if (nbytes == 0) return report(otherwise, code);
  hear();
  const auto violation = order_.forget(reinterpret_cast<uintptr_t>(address), nbytes, host_);
  if (violation && in_use == InUse::kForbidden) report(*violation, kSuccess);
  return kSuccess;
}

int System::free_device(void* address, InUse in_use) {
  if (address == nullptr) return kSuccess;
  const int device = owner(address);
  return give_back(address, in_use, "device memory is given back that is not allocated", kInvalidValue,
                   [&] { return device < 0 ? 0 : devices_[device]->memory.free(address); });
}

int System::allocate_pinned(void** address, size_t nbytes) {
  const std::lock_guard lock(mutex_);
  *address = pinned_.allocate(nbytes);
  if (*address == nullptr) return kOutOfMemory;
  mapped_.add(*address, nbytes);  // as all that CUDA allocates in a unified address space
  return kSuccess;
}

int System::free_pinned(void* address) {
  if (address == nullptr) return kSuccess;
  return give_back(address, InUse::kWaitedFor, "pinned memory is given back that is not allocated", kInvalidValue,
                   [&] { return mapped_.remove(address), pinned_.free(address); });
}

int System::register_pinned(void* address, size_t nbytes, bool is_mapped) {
  const std::lock_guard lock(mutex_);
  if (owner(address) >= 0) return report("device memory is pinned", kInvalidValue);
  if (pinned_.meets(address, nbytes)) return report("memory is pinned that is pinned already", kAlreadyRegistered);
  pinned_.add(address, nbytes);
  if (is_mapped) (has_host_addresses ? mapped_ : elsewhere_).add(address, nbytes);
  return kSuccess;
}

int System::unregister_pinned(void* address, InUse in_use) {
  return give_back(address, in_use, "memory is unpinned that is not pinned", kHostMemoryNotRegistered, [&] {
    mapped_.remove(address), elsewhere_.remove(address);
    return pinned_.remove(address);
  });
}

}  // namespace emulated_gpu
