#include "test_device.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <thread>

#include "../../csrc/driver/cuda_abi.h"
#include "../../tools/emulated_gpu/device/system.h"
#include "lmswap/engine.h"
#include "lmswap/tiers/arena.h"

namespace lmswap::test {

using emulated_gpu::System;

namespace {

class HostDevice final : public TestDevice {
 public:
  explicit HostDevice(const std::string& faults_text) {
    faults = std::make_shared<Faults>(faults_text);
    driver = open_host_driver(faults);
  }
  uint64_t allocate(uint64_t nbytes) override {
    return reinterpret_cast<uint64_t>(std::aligned_alloc(kPageBytes, round_to_pages(nbytes)));
  }
  void free(uint64_t pointer) override { std::free(reinterpret_cast<void*>(pointer)); }
  void upload(uint64_t pointer, const Bytes& bytes) override {
    std::memcpy(reinterpret_cast<void*>(pointer), bytes.data(), bytes.size());
  }
  Bytes download(uint64_t pointer, uint64_t nbytes) override {
    const auto* begin = reinterpret_cast<const std::byte*>(pointer);
    return {begin, begin + nbytes};
  }
  void fill(uint64_t pointer, uint64_t nbytes, std::byte value) override {
    std::memset(reinterpret_cast<void*>(pointer), static_cast<int>(value), nbytes);
  }
  void copy(uint64_t to, uint64_t from, uint64_t nbytes) override {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes);
  }
  StreamHandle make_stream() override { return 0; }
  std::vector<std::string> violations() override { return {}; }
};

// Through the symbols that the emulated and the real driver share.
class CudaDevice final : public TestDevice {
 public:
  CudaDevice(const std::string& library, const std::string& faults_text, double max_delay_seconds)
      : library_(dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)), is_emulated_(library == LMSWAP_EMULATED_GPU) {
    if (library_ == nullptr) throw std::runtime_error(dlerror());
    if (is_emulated_) calm_emulated_gpu().configure({}, max_delay_seconds);
    plan_failures(faults_text);
    driver = open_cuda_driver(library, 0);
    find<int (*)(cuda::Context*, int)>("cuDevicePrimaryCtxRetain")(&context_, 0);
    stream = make_stream();
  }

  ~CudaDevice() override {
    synchronize();
    for (const StreamHandle made : streams_) driver->destroy_stream(made);
    driver.reset();
    find<int (*)(int)>("cuDevicePrimaryCtxRelease_v2")(0);
  }

  uint64_t allocate(uint64_t nbytes) override {
    cuda::DevicePointer pointer = 0;
    call(find<int (*)(cuda::DevicePointer*, size_t)>("cuMemAlloc_v2"), &pointer, nbytes);
    return pointer;
  }
  void free(uint64_t pointer) override {
    synchronize();
    call(find<int (*)(cuda::DevicePointer)>("cuMemFree_v2"), pointer);
  }
  void upload(uint64_t pointer, const Bytes& bytes) override {
    call(find<int (*)(cuda::DevicePointer, const void*, size_t)>("cuMemcpyHtoD_v2"), pointer, bytes.data(),
         bytes.size());
  }
  Bytes download(uint64_t pointer, uint64_t nbytes) override {
    synchronize();
    Bytes bytes(nbytes);
    call(find<int (*)(void*, cuda::DevicePointer, size_t)>("cuMemcpyDtoH_v2"), bytes.data(), pointer, nbytes);
    return bytes;
  }
  void fill(uint64_t pointer, uint64_t nbytes, std::byte value) override {
    take_time();
    call(find<int (*)(cuda::DevicePointer, unsigned char, size_t, StreamHandle)>("cuMemsetD8Async"), pointer,
         static_cast<unsigned char>(value), nbytes, stream);
  }
  void copy(uint64_t to, uint64_t from, uint64_t nbytes) override {
    take_time();
    call(find<int (*)(cuda::DevicePointer, cuda::DevicePointer, size_t, StreamHandle)>("cuMemcpyDtoDAsync_v2"), to,
         from, nbytes, stream);
  }
  StreamHandle make_stream() override { return streams_.emplace_back(driver->create_stream()); }

  std::vector<std::string> violations() override {
    return is_emulated_ ? System::instance().violations.take() : std::vector<std::string>();
  }

 private:
  template <typename Function>
  Function find(const char* symbol) const {
    return reinterpret_cast<Function>(dlsym(library_, symbol));
  }

  // Calls with the device's context current, on whatever thread.
  template <typename... Parameters, typename... Arguments>
  void call(int (*function)(Parameters...), Arguments... arguments) const {
    find<int (*)(cuda::Context)>("cuCtxPushCurrent_v2")(context_);
    const int result = function(arguments...);
    cuda::Context popped;
    find<int (*)(cuda::Context*)>("cuCtxPopCurrent_v2")(&popped);
    if (result != 0) throw std::runtime_error("a call of the test device failed: " + std::to_string(result));
  }

  void synchronize() const { driver->synchronize_stream(stream); }

  void take_time() {
    const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
    call(find<int (*)(StreamHandle, void (*)(void*), void*)>("cuLaunchHostFunc"), stream, sleep, nullptr);
  }

  // A numbered failure of a driver call is the device's here; delays are set for all calls, the rest is for the disk.
  void plan_failures(const std::string& text) {
    faults = std::make_shared<Faults>(text);
    const std::multimap<std::string, const char*> symbols = {
        {"allocate_host@", "cuMemHostRegister_v2"}, {"allocate_device@", "cuMemAlloc_v2"},
        {"copy_between@", "cuMemcpyDtoDAsync_v2"},  {"copy_between@", "cuMemcpyPeerAsync"},
        {"copy_out@", "cuMemcpyDtoHAsync_v2"},      {"copy_in@", "cuMemcpyHtoDAsync_v2"}};
    for (const auto& [call, symbol] : symbols) {
      const size_t found = text.find(call);
      if (found == std::string::npos || text.compare(found + call.size(), 1, "*") == 0) continue;
      if (!is_emulated_) throw std::runtime_error("only the emulated driver fails on demand");
      constexpr int kUnknownError = 999;
      System::instance().faults.plan(symbol, std::stoull(text.substr(found + call.size())), kUnknownError);
    }
  }

  void* library_;
  bool is_emulated_;
  cuda::Context context_ = nullptr;
  std::vector<StreamHandle> streams_;
};

bool has_cuda(int device) {
  try {
    open_cuda_driver("libcuda.so.1", device);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::unique_ptr<TestDevice> make_test_device(const std::string& kind, const std::string& faults,
                                             double max_delay_seconds) {
  if (kind == "host") return std::make_unique<HostDevice>(faults);
  const char* library = kind == "cuda" ? "libcuda.so.1" : LMSWAP_EMULATED_GPU;
  if (kind == "emulated_one_queue") setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  auto device = std::make_unique<CudaDevice>(library, faults, max_delay_seconds);
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return device;
}

System& calm_emulated_gpu() {
  System& system = System::instance();
  system.configure({}, 0);
  system.configure(emulated_gpu::Queues{});
  system.configure(emulated_gpu::Peers{});
  system.faults.mend();
  system.violations.take();
  system.ignores_waits_of_the_driver = false;
  system.has_host_addresses = true;
  return system;
}

std::vector<std::string> test_device_kinds() {
  std::vector<std::string> kinds = {"host", "emulated"};
  if (has_cuda(0)) kinds.emplace_back("cuda");
  return kinds;
}

std::vector<std::string> tiers_of(const std::string& kind) {
  if (kind == "cuda" && !has_cuda(1)) return {"host", "device", "disk", "compressed"};
  return {"host", "device", "peer", "disk", "compressed"};
}

bool is_io(const std::string& tier) { return tier == "disk" || tier == "compressed"; }

void open_tier(Engine& engine, const std::string& tier, uint64_t limit_bytes, const std::string& directory) {
  if (tier == "host") return engine.open_host_tier(limit_bytes);
  if (tier == "device") return engine.open_device_tier(limit_bytes);
  if (tier == "peer") return engine.open_peer_tier(1, limit_bytes);
  if (tier == "compressed") return engine.open_compressed_tier(limit_bytes, 3);
  engine.open_disk_tier(directory, limit_bytes, 3);
}

std::vector<TierSetup> tier_setups() {
  std::vector<TierSetup> setups;
  for (const std::string& device : test_device_kinds()) {
    for (const std::string& tier : tiers_of(device)) setups.push_back({device, tier});
  }
  return setups;
}

// SplitMix64, a word at a time. ThreadSanitizer would take longer to watch it than for most of the tests.
__attribute__((no_sanitize("thread"))) Bytes make_bytes(uint64_t nbytes, uint64_t seed) {
  Bytes bytes(nbytes);
  std::byte* const data = bytes.data();
  for (uint64_t i = 0; i < nbytes; i += sizeof(uint64_t)) {
    seed += 0x9e3779b97f4a7c15;
    uint64_t word = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9;
    word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
    word ^= word >> 31;
    const uint64_t left = nbytes - i;
    if (left < sizeof word) {
      std::memcpy(data + i, &word, left);
    } else {
      std::memcpy(data + i, &word, sizeof word);
    }
  }
  return bytes;
}

TestDirectory::TestDirectory() {
  std::string pattern = (std::filesystem::current_path() / "lmswap-test-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no directory can be made for the tests' files");
  path_ = pattern;
}

TestDirectory::~TestDirectory() { std::filesystem::remove_all(path_); }

}  // namespace lmswap::test
