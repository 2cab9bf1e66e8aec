#include "lmswap/tiers/host_range.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "lmswap/error.h"
#include "lmswap/limits.h"
#include "lmswap/text.h"
#include "lmswap/tiers/arena.h"

namespace lmswap {
namespace {

constexpr uint64_t kHugePageBytes = 2 << 20;

DriverError memory_error(const char* call, uint64_t nbytes) {
  const int code = errno;
  return DriverError(std::string(call) + " of " + format_bytes(nbytes) + " failed: " + errno_text(code));
}

// Preferred, not bound: where the node has no more memory, another one's is slower, but the process continues. By the
// system call, as libnuma may be missing. Returns the errno of a refusal, or 0.
int prefer_node(std::byte* begin, uint64_t nbytes, int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED of linux/mempolicy.h
  constexpr unsigned kBits = 8 * sizeof(unsigned long);
  if (node < 0) return 0;
  const auto number = static_cast<unsigned>(node);
  std::vector<unsigned long> nodes(number / kBits + 1);
  nodes.back() = 1UL << number % kBits;
  // One bit more than there are: the kernel ignores the last one.
  return syscall(SYS_mbind, begin, nbytes, kPreferred, nodes.data(), nodes.size() * kBits + 1, 0) == 0 ? 0 : errno;
}

// Parses a list in the kernel's format: "0-15,32,34-47".
std::optional<cpu_set_t> cpus_of_node(int node, const std::string& nodes) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (const std::string& part : split(read_file(nodes + "/node" + std::to_string(node) + "/cpulist"), ',')) {
    size_t first = 0, last = 0;
    const int num_read = std::sscanf(part.c_str(), "%zu-%zu", &first, &last);
    for (last = num_read == 1 ? first : last; num_read > 0 && first <= last; ++first) CPU_SET(first, &cpus);
  }
  if (CPU_COUNT(&cpus) == 0) return std::nullopt;
  return cpus;
}

void warn_placement(int node, int refusal) {
  static std::atomic_flag has_warned;
  if (has_warned.test_and_set()) return;
  log_error("pinned memory may lie on another NUMA node than the GPU's, node " + std::to_string(node) +
            ", which costs copies up to a third of their rate: mbind failed: " + errno_text(refusal) +
            ", and no thread may run on that node's CPUs. Allow the call (docker run --cap-add SYS_NICE), or give the "
            "process CPUs of that node");
}

}  // namespace

uint64_t system_page_bytes() {
  return std::max(kPageBytes, static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));  // tiers allocate in kPageBytes
}

HostRange::HostRange(uint64_t max_bytes, int node, uint64_t page_bytes, std::string nodes)
    : page_bytes_(page_bytes),
      max_bytes_(round_up(max_bytes)),
      mapped_bytes_(max_bytes_ + kHugePageBytes),
      node_(node),
      nodes_(std::move(nodes)) {
  mapped_ = mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped_ == MAP_FAILED) throw memory_error("mmap", mapped_bytes_);
  const auto begin = reinterpret_cast<uintptr_t>(mapped_);
  data_ = static_cast<std::byte*>(mapped_) + (kHugePageBytes - begin % kHugePageBytes) % kHugePageBytes;
  madvise(mapped_, mapped_bytes_, MADV_HUGEPAGE);  // kernels without huge pages refuse it, which does no harm
  madvise(mapped_, mapped_bytes_, MADV_DONTFORK);
  refusal_ = prefer_node(data_, max_bytes_, node);
}

HostRange::~HostRange() { munmap(mapped_, mapped_bytes_); }

void HostRange::extend(uint64_t nbytes) {
  nbytes = round_up(nbytes);
  if (nbytes > max_bytes_) {
    throw DriverError("host memory of at most " + format_bytes(max_bytes_) + " cannot be extended to " +
                      format_bytes(nbytes));
  }
  if (nbytes <= nbytes_) return;  // already within the last page
  const uint64_t more_bytes = nbytes - nbytes_;
  if (mprotect(data_ + nbytes_, more_bytes, PROT_READ | PROT_WRITE) != 0) throw memory_error("mprotect", more_bytes);
  fault_in(data_ + nbytes_, more_bytes);
  nbytes_ = nbytes;
}

void HostRange::shrink(uint64_t nbytes) noexcept {
  nbytes = round_up(nbytes);
  madvise(data_ + nbytes, nbytes_ - nbytes, MADV_DONTNEED);
  mprotect(data_ + nbytes, nbytes_ - nbytes, PROT_NONE);
  nbytes_ = nbytes;
}

// In parallel: one thread zeroes a few GB/s, and a plan may need a hundred GB. Where mbind was refused, the caller,
// which may run on any node, touches nothing itself.
void HostRange::fault_in(std::byte* begin, uint64_t nbytes) const {
  constexpr uint64_t kMaxThreads = 8, kLeastBytes = 64 << 20;  // of a thread
  const auto cpus = refusal_ != 0 ? cpus_of_node(node_, nodes_) : std::nullopt;
  const uint64_t most = std::min<uint64_t>(kMaxThreads, std::thread::hardware_concurrency());
  const uint64_t num_threads = std::max<uint64_t>(1, std::min(most, nbytes / kLeastBytes));
  const uint64_t part_bytes = (nbytes / num_threads / kHugePageBytes + 1) * kHugePageBytes;
  std::atomic<bool> is_placed = refusal_ == 0 || cpus;
  const auto touch = [&](uint64_t from) {
    const uint64_t end = std::min(nbytes, from + part_bytes);
    for (uint64_t at = from; at < end; at += kPageBytes) const_cast<volatile std::byte&>(begin[at]) = std::byte{0};
  };
  const auto touch_on_node = [&](uint64_t from) {
    if (cpus && sched_setaffinity(0, sizeof *cpus, &*cpus) != 0) is_placed = false;
    touch(from);
  };
  std::vector<std::thread> threads;
  threads.reserve(num_threads);
  for (uint64_t from = cpus ? 0 : part_bytes; from < nbytes; from += part_bytes) {
    try {
      threads.push_back(start_thread<DriverError>("a thread that zeroes memory", [=] { touch_on_node(from); }));
    } catch (const std::exception&) {
      touch(from);  // slower, but sufficient
      if (cpus) is_placed = false;
    }
  }
  if (!cpus) touch(0);
  for (std::thread& thread : threads) thread.join();
  if (!is_placed) warn_placement(node_, refusal_);
}

int numa_node_of(std::string pci_address, const std::string& devices) {
  // The driver uses upper case, the kernel lower case.
  std::transform(pci_address.begin(), pci_address.end(), pci_address.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  int node = -1;
  return std::sscanf(read_file(devices + "/" + pci_address + "/numa_node").c_str(), "%d", &node) == 1 ? node : -1;
}

}  // namespace lmswap
