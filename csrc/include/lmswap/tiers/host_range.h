// Memory for a driver to pin: addresses are taken once, and memory put behind them from their begin on as more is
// needed, so that what lies there stays where it is.
//
// It comes in huge pages where the kernel has some, from the NUMA node of the device while that has any: from another
// one a third of the link's rate was measured to be lost. Where the kernel may not be told so (containers often refuse
// mbind), threads on that node's CPUs touch it first, which has the same effect. Forked children do not get it. Else
// the kernel would copy all of it for each data loader's worker, or, before Linux 5.12, give it other pages than those
// that the device writes to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace lmswap {

uint64_t system_page_bytes();

class HostRange {
 public:
  // `node`: where memory shall come from, -1 for anywhere. `page_bytes` is the kernel's page, 64 KiB on some machines;
  // `nodes` is where the kernel tells of them. Throws Error(kDriver), as `extend` does.
  HostRange(uint64_t most_bytes, int node, uint64_t page_bytes = system_page_bytes(),
            std::string nodes = "/sys/devices/system/node");
  ~HostRange();
  HostRange(const HostRange&) = delete;
  HostRange& operator=(const HostRange&) = delete;

  std::byte* data() const { return data_; }
  uint64_t nbytes() const { return nbytes_; }

  void extend(uint64_t nbytes);  // to so many, rounded to the kernel's pages; on return all of it is there
  void shrink(uint64_t nbytes) noexcept;

 private:
  uint64_t round_up(uint64_t nbytes) const { return (nbytes + page_bytes_ - 1) / page_bytes_ * page_bytes_; }
  void fault_in(std::byte* begin, uint64_t nbytes) const;

  const uint64_t page_bytes_;
  void* mapped_;
  const uint64_t most_bytes_, mapped_bytes_;
  const int node_;
  const std::string nodes_;
  int refusal_ = 0;  // the kernel's, of memory of the node
  std::byte* data_;
  uint64_t nbytes_ = 0;
};

// The node that a device is attached to, by its address on the PCI bus as cuDeviceGetPCIBusId says it; -1: the kernel
// knows none, as where there is only one.
int numa_node_of(std::string pci_address, const std::string& devices = "/sys/bus/pci/devices");

}  // namespace lmswap
