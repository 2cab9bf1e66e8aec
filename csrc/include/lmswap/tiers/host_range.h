/// @file
/// @brief Growable host memory near a device, for a driver to pin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace lmswap {

/// @return the kernel's page, at least `kPageBytes`
uint64_t system_page_bytes();

/// @brief An address range whose memory is committed from its begin on, as more is needed; bytes never move.
///
/// Memory comes in huge pages where the kernel has some, from the NUMA node of the device while that has any: from
/// another one a third of the link's rate was measured to be lost. Where the kernel refuses mbind (containers often
/// do), threads on that node's CPUs touch the memory first, which has the same effect. Forked children do not inherit
/// it; else the kernel would copy all of it for each data loader's worker, or, before Linux 5.12, give the process
/// other pages than those that the device writes to. Not thread-safe.
class HostRange {
 public:
  /// @param max_bytes the most that it can be extended to
  /// @param node preferred NUMA node; -1: any
  /// @param page_bytes the kernel's page, 64 KiB on some machines
  /// @param nodes sysfs directory of the NUMA nodes
  /// @throws DriverError if the addresses cannot be reserved
  HostRange(uint64_t max_bytes, int node, uint64_t page_bytes = system_page_bytes(),
            std::string nodes = "/sys/devices/system/node");
  ~HostRange();
  HostRange(const HostRange&) = delete;
  HostRange& operator=(const HostRange&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] uint64_t nbytes() const { return nbytes_; }

  /// @brief Commits memory up to `nbytes`, rounded to the kernel's pages; on return all pages are resident.
  /// @throws DriverError if the system refuses, or `nbytes` is more than `max_bytes`
  void extend(uint64_t nbytes);

  /// @brief Gives memory beyond `nbytes` back to the kernel.
  void shrink(uint64_t nbytes) noexcept;

 private:
  [[nodiscard]] uint64_t round_up(uint64_t nbytes) const {
    return (nbytes + page_bytes_ - 1) / page_bytes_ * page_bytes_;
  }
  void fault_in(std::byte* begin, uint64_t nbytes) const;

  const uint64_t page_bytes_;
  void* mapped_;
  const uint64_t max_bytes_, mapped_bytes_;
  const int node_;
  const std::string nodes_;
  int refusal_ = 0;  // errno of mbind
  std::byte* data_;
  uint64_t nbytes_ = 0;
};

/// @return the NUMA node of a PCI device; -1 if the kernel knows none, as where there is only one
/// @param pci_address as cuDeviceGetPCIBusId returns it
/// @param devices sysfs directory of the PCI devices
int numa_node_of(std::string pci_address, const std::string& devices = "/sys/bus/pci/devices");

}  // namespace lmswap
