#include "lmswap/tiers/host_range.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <fstream>
#include <thread>
#include <vector>

#include "lmswap/error.h"
#include "lmswap/tiers/arena.h"

namespace lmswap {
namespace {

constexpr uint64_t kHugePageBytes = 2 << 20;

Error memory_error(const char* call, uint64_t nbytes) {
  const int code = errno;
  return Error(ErrorKind::kDriver, std::string(call) + " of " + format_bytes(nbytes) + " failed: " + errno_text(code));
}

// Preferred, not bound: where the node has no more, another one's memory is slower, and not the end of the process. By
// the bare call, as libnuma need not be there; refused in some containers, where memory comes from wherever it does.
void prefer_node(std::byte* begin, uint64_t nbytes, int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED of linux/mempolicy.h
  constexpr unsigned kBits = 8 * sizeof(unsigned long);
  if (node < 0) return;
  const auto number = static_cast<unsigned>(node);
  std::vector<unsigned long> nodes(number / kBits + 1);
  nodes.back() = 1UL << number % kBits;
  // One bit more than are there: the kernel leaves the last one out.
  syscall(SYS_mbind, begin, nbytes, kPreferred, nodes.data(), nodes.size() * kBits + 1, 0);
}

// One thread zeroes a few GB/s, and a plan may want a hundred of them.
void fault_in(std::byte* begin, uint64_t nbytes) {
  constexpr uint64_t kMostThreads = 8, kLeastBytes = 64 << 20;  // of a thread
  const uint64_t most = std::min<uint64_t>(kMostThreads, std::thread::hardware_concurrency());
  const uint64_t num_threads = std::max<uint64_t>(1, std::min(most, nbytes / kLeastBytes));
  const uint64_t part_bytes = (nbytes / num_threads / kHugePageBytes + 1) * kHugePageBytes;
  const auto touch = [=](uint64_t from) {
    const uint64_t end = std::min(nbytes, from + part_bytes);
    for (uint64_t at = from; at < end; at += kPageBytes) const_cast<volatile std::byte&>(begin[at]) = std::byte{0};
  };
  std::vector<std::jthread> threads;
  for (uint64_t from = part_bytes; from < nbytes; from += part_bytes) threads.emplace_back(touch, from);
  touch(0);
}

}  // namespace

HostRange::HostRange(uint64_t most_bytes, int node)
    : most_bytes_(round_to_pages(most_bytes)), mapped_bytes_(most_bytes_ + kHugePageBytes), node_(node) {
  mapped_ = mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped_ == MAP_FAILED) throw memory_error("mmap", mapped_bytes_);
  const auto begin = reinterpret_cast<uintptr_t>(mapped_);
  data_ = static_cast<std::byte*>(mapped_) + (kHugePageBytes - begin % kHugePageBytes) % kHugePageBytes;
  madvise(mapped_, mapped_bytes_, MADV_HUGEPAGE);  // refused by kernels without; the memory is the same
  madvise(mapped_, mapped_bytes_, MADV_DONTFORK);
  prefer_node(data_, most_bytes_, node);
}

HostRange::~HostRange() { munmap(mapped_, mapped_bytes_); }

void HostRange::extend(uint64_t nbytes) {
  nbytes = round_to_pages(nbytes);
  if (nbytes > most_bytes_) {
    throw Error(ErrorKind::kDriver, "host memory of at most " + format_bytes(most_bytes_) + " cannot be extended to " +
                                        format_bytes(nbytes));
  }
  const uint64_t more_bytes = nbytes - nbytes_;
  if (mprotect(data_ + nbytes_, more_bytes, PROT_READ | PROT_WRITE) != 0) throw memory_error("mprotect", more_bytes);
  fault_in(data_ + nbytes_, more_bytes);
  nbytes_ = nbytes;
}

void HostRange::shrink(uint64_t nbytes) noexcept {
  madvise(data_ + nbytes, nbytes_ - nbytes, MADV_DONTNEED);
  mprotect(data_ + nbytes, nbytes_ - nbytes, PROT_NONE);
  nbytes_ = nbytes;
}

int numa_node_of(std::string pci_address, const std::string& devices) {
  // The driver writes it in capitals, the kernel does not.
  std::transform(pci_address.begin(), pci_address.end(), pci_address.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  int node = -1;
  std::ifstream file(devices + "/" + pci_address + "/numa_node");
  return file >> node ? node : -1;
}

}  // namespace lmswap
